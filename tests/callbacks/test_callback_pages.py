"""Every callback's page has one form: its question, an example, a picture, what it logs, its arguments, its limits."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_memtools as memtools
from tests.event_files import scalars, texts_of
from tests.integration import two_ranks
from tests.lightning_models import Adversaries, Regression, loader, trainer
from tests.two_processes import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "MemoryMonitor": "memory-monitor",
    "LossCurves": "loss-curves",
    "EmptyCache": "empty-cache",
    "OOMReport": "oom-report",
    "OOMRecovery": "oom-recovery",
    "HaltOnNaN": "halt-on-nan",
    "LossSpikes": "loss-spikes",
    "TrainingDoctor": "training-doctor",
    "GradientCheckpointing": "gradient-checkpointing",
    "BatchSizeTuner": "batch-size",
}
ONLY_ON_CUDA = {"memory/host/pinned_gib"}
PLACEHOLDERS = {
    "<stage>": "(train|val|test|predict)",
    "<phase>": "(forward|backward|optimizer)",
    "<category>": "(parameters|gradients|optimizer|activations|inputs|other)",
    "<i>": r"\d+",
    "<name>": "[^/]+",
}
LARGEST_PICTURE = 150_000

every_page = pytest.mark.parametrize("callback", PAGES)


def text_of(name: str) -> str:
    return (DOCS / f"{PAGES.get(name, 'virtual-device')}.md").read_text("utf-8")


def table(name: str, title: str) -> list[list[str]]:
    """The rows of the first table of a section."""
    section = text_of(name).partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.search(r"^\|.*(?:\n\|.*)+", section, re.MULTILINE)
    assert found is not None
    _, _, *rows = found[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_every_callback_has_a_page():
    found = {
        name
        for name in memtools.__all__
        if isinstance(one := getattr(memtools, name), type) and issubclass(one, L.Callback)
    }
    assert found == set(PAGES)


@every_page
def test_a_page_begins_with_its_question_an_example_and_a_picture(callback):
    """The guide's table has the same question. tests/test_docs.py runs the example."""
    beginning = text_of(callback).partition("\n## ")[0]
    title, question = re.match(r"# (\w+)\n\n\*\*(.+?\?)\*\*", beginning).groups()
    assert title == callback
    assert f"| {question} | [{callback}]({PAGES[callback]}.md)" in (DOCS / "guide.md").read_text("utf-8")
    picture = re.search(r"!\[(.+?)\]\((images/[\w-]+\.png)\)", beginning, re.DOTALL)
    assert 0 < beginning.find("```python") < beginning.find(f"{callback}(") < picture.start()
    words, path = picture.groups()
    assert len(words.split()) >= 5, "who cannot see it reads what it shows"
    content = (DOCS / path).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < LARGEST_PICTURE


@pytest.mark.parametrize("name", [*PAGES, "VirtualDevice"])
def test_a_page_has_the_arguments_with_their_defaults_and_the_limits(name):
    parameters = inspect.signature(getattr(memtools, name)).parameters
    told = {argument.strip("`"): ast.literal_eval(default) for argument, default, _ in table(name, "Arguments")}
    assert told == {argument: parameter.default for argument, parameter in parameters.items()}
    assert "\n- " in text_of(name).partition("\n## Limits\n")[2]


def tags_of(callback: str) -> set[str]:
    """Those in the table of what is logged: tags, unit, meaning."""
    return {tag for tags, _unit, _meaning in table(callback, "What it logs") for tag in re.findall(r"`([^`]+)`", tags)}


def pattern_of(tag: str) -> str:
    for placeholder, pattern in PLACEHOLDERS.items():
        tag = tag.replace(placeholder, pattern)
    assert "<" not in tag, f"{tag} has a placeholder that nobody knows"
    return tag


class Keeps(Regression):
    """Runs out of memory at the largest batches, and keeps some activations."""

    def __init__(self, batch_size: int = 4, width: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        blocks = [nn.Sequential(nn.Linear(4 if i == 0 else width, width), nn.GELU()) for i in range(6)]
        self.net = nn.Sequential(*blocks, nn.Linear(width, 1))

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return loader(4096, self.batch_size)


class Diverges(Regression):
    """Its loss is NaN in the second and in the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (torch.nan if batch_idx in {1, 2} else 1)


class Jumps(Regression):
    """Its loss jumps in the 13th step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1000 if batch_idx == 12 else 1)


class Collects(Regression):
    """Keeps each step's loss with its graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept = [*getattr(self, "kept", []), loss]
        return loss


class TwoLoaders(Regression):
    """Has two validation loaders and two validation losses."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.loss(batch)


class TwoLosses(Regression):
    """Logs two losses in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"a_loss": self.loss(batch), "b_loss": self.loss(batch)})


def logged_in(root: Path, callback: L.Callback, model: L.LightningModule, *data: Any, **options: Any) -> set[str]:
    """The tags that a fit with the callback alone logs; what the module logs itself is left out."""
    run = trainer(root, callback, **options)
    try:
        run.fit(model, *data)
        if isinstance(callback, memtools.MemoryMonitor):
            run.validate(model, loader(16), verbose=False)
            run.test(model, loader(16), verbose=False)
            run.predict(model, loader(8))
    except (torch.OutOfMemoryError, memtools.NonFiniteError):
        pass
    found = set(scalars(run.log_dir)) | set(texts_of(run.log_dir))
    return {tag for tag in found if "/" in tag}


def of_memory_monitor(root: Path) -> set[str]:
    monitor = memtools.MemoryMonitor(phases=True)
    found = logged_in(root / "one", monitor, Regression(), loader(), loader(16, seed=1))
    (root / "two").mkdir()
    run_ranks(Path(two_ranks.__file__), root / "two", "monitor", timeout_s=120)
    return found | {tag for tag in scalars(root / "two" / "monitor" / "board") if tag.startswith("memory/")}


def of_loss_curves(root: Path) -> set[str]:
    return (
        logged_in(root, memtools.LossCurves(), Adversaries(), loader(), loader(16))
        | logged_in(root, memtools.LossCurves(), TwoLoaders(), loader(), [loader(16), loader(16)])
        | logged_in(root, memtools.LossCurves(), TwoLosses(), loader(), loader(16))
    )


RUNS: dict[str, Callable[[Path], set[str]]] = {
    "MemoryMonitor": of_memory_monitor,
    "LossCurves": of_loss_curves,
    "EmptyCache": lambda root: logged_in(root, memtools.EmptyCache(), Collects(), loader(), loader(16), max_epochs=4),
    "OOMReport": lambda root: logged_in(root, memtools.OOMReport(), Keeps(4096)),
    "OOMRecovery": lambda root: logged_in(root, memtools.OOMRecovery(loss="mean"), Keeps(4096)),
    "HaltOnNaN": lambda root: logged_in(root, memtools.HaltOnNaN(max_skips=1), Diverges(), loader()),
    "LossSpikes": lambda root: logged_in(root, memtools.LossSpikes(warm_up=10, window=10), Jumps(), loader(128)),
    "TrainingDoctor": lambda root: logged_in(
        root, memtools.TrainingDoctor(steps=8), Collects(), loader(), loader(16), max_epochs=2
    ),
    "GradientCheckpointing": lambda root: logged_in(root, memtools.GradientCheckpointing(), Keeps(256), max_steps=4),
    "BatchSizeTuner": lambda root: logged_in(root, memtools.BatchSizeTuner(max_trials=3), Keeps(), max_steps=1),
}
SMALL = {"OOMReport", "OOMRecovery", "BatchSizeTuner"}
"""Those whose run has to fill a device."""


@pytest.mark.filterwarnings("ignore")
@every_page
def test_the_tags_on_the_page_are_those_that_the_callback_logs(callback, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_memtools.oom.oom_reporter.CHECKS_S", 0.0)  # the advice is not looked at here
    with memtools.VirtualDevice("8MiB" if callback in SMALL else "1GiB"):
        logged = RUNS[callback](tmp_path)
    tags = tags_of(callback)
    assert logged
    unknown = {one for one in logged if not any(re.fullmatch(pattern_of(tag), one) for tag in tags)}
    assert not unknown, "logged, and not on the page"
    never = {tag for tag in tags - ONLY_ON_CUDA if not any(re.fullmatch(pattern_of(tag), one) for one in logged)}
    assert not never, "on the page, and not logged"
