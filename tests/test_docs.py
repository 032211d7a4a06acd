"""The manual: every block of code runs as it stands on its page, and its lists are those of the package."""

import contextlib
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, TensorDataset

import lightning_memtools
from lightning_memtools import NonFiniteError
from lightning_memtools.cli.main import command_parser
from tests import gpu_docs
from tests.prepared.starting import prepared_python

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text("utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
ENDS_WITH = {"halt-on-nan.md": NonFiniteError, "oom-report.md": torch.OutOfMemoryError}
"""Pages that show what becomes of an error."""
RUN_ON_THE_NULL_DEVICE = {"dry-run.md"}
"""Pages that tests/null_cuda/test_dry_run.py runs."""


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def names_that_pages_take_for_granted() -> dict[str, object]:
    """A model and its loaders, which a reader has and a page need not show."""
    model = torch.nn.Linear(4, 1)
    rows = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    return {
        "__name__": "__main__",
        "L": L,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": torch.nn.functional.mse_loss,
        "train_loader": DataLoader(rows, batch_size=8),
        "val_loader": DataLoader(rows, batch_size=8),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in RUN_ON_THE_NULL_DEVICE])
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "replay.md":
        write_the_capsule()
    names = names_that_pages_take_for_granted()
    expected = ENDS_WITH.get(page)
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        for number, block in enumerate(blocks(page)):
            path = tmp_path / ("train.py" if expected else f"block{number}.py")
            path.write_text(block)
            exec(compile(block, str(path), "exec"), names)  # noqa: S102, our own pages


def write_the_capsule():
    """The example of HaltOnNaN's page leaves the capsule that the page on replays begins with."""
    Path("train.py").write_text(blocks("halt-on-nan.md")[0])
    done = subprocess.run([prepared_python(), "train.py"], check=False)
    assert done.returncode == 1


@pytest.mark.filterwarnings("ignore")
def test_the_error_on_the_page_is_the_one_that_its_example_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(blocks("halt-on-nan.md")[0])
    with pytest.raises(NonFiniteError) as caught:
        runpy.run_path("train.py", run_name="__main__")
    printed = blocks("halt-on-nan.md", "text")[0]
    assert str(caught.value).splitlines()[:4] == printed.removeprefix("NonFiniteError: ").splitlines()[:4]


@pytest.mark.parametrize(
    "text", [text for page in ("README.md", "guide-lightning-cli.md") for text in blocks(page, "yaml")]
)
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_yaml_makes_its_callbacks(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text)
    cli = LightningCLI(BoringModel, run=False, args=["--config", "config.yaml"], save_config_callback=None)
    wanted = yaml.safe_load(text)["trainer"]["callbacks"]
    made = {type(one).__name__ for one in cli.trainer.callbacks}
    assert {one["class_path"].rpartition(".")[2] for one in wanted} <= made


def test_the_workflow_on_the_page_is_the_file_and_runs_commands_that_exist():
    text = (ROOT / "examples" / "memory_budgets_workflow.yml").read_text("utf-8")
    assert text in blocks("memory-budgets.md", "yaml")
    steps = yaml.safe_load(text)["jobs"]["budgets"]["steps"]
    ran = "\n".join(step.get("run", "") for step in steps).replace("\\\n", "")
    parser = command_parser()
    lines = re.findall(r"\.venv/bin/memtools (.*?)(?: \|.*)?$", ran, re.MULTILINE)
    assert [parser.parse_args(shlex.split(line)).run.__module__.rpartition(".")[2] for line in lines] == [
        "dry_run",
        "diff",
    ]


def test_the_list_of_gpus_is_that_of_the_package():
    assert gpu_docs.PAGE.read_text("utf-8") == gpu_docs.page(), "run: python -m tests.gpu_docs"


def test_the_reference_has_every_public_name():
    documented = re.findall(r"^::: [\w.]+\.(\w+)$", PAGES["api.md"], re.MULTILINE)
    assert sorted(documented) == sorted(lightning_memtools.__all__)
    homes = re.findall(r"^::: ([\w.]+)\.(\w+)$", PAGES["api.md"], re.MULTILINE)
    for module, name in homes:
        public = getattr(lightning_memtools, name)
        assert public.__module__ == module, f"api.md looks for {name} in {module}"


def test_the_reference_lists_members_that_exist():
    listed = re.findall(r"^::: [\w.]+\.(\w+)\n +options:\n +members: \[(.*)\]$", PAGES["api.md"], re.MULTILINE)
    missing = [
        f"{name}.{member}"
        for name, members in listed
        for member in members.split(", ")
        if not hasattr(getattr(lightning_memtools, name), member)
    ]
    assert missing == []
    assert len(listed) > 3


def test_every_file_that_a_page_names_exists():
    for page, text in PAGES.items():
        for named in re.findall(r"`((?:benchmarks|tests|examples|lightning_memtools|docs)/[\w./-]+\.\w+)`", text):
            assert (ROOT / named).exists(), f"{page} names {named}"
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            folder = ROOT if page == "README.md" else ROOT / "docs"
            assert (folder / link).exists(), f"{page} links to {link}"
