"""Runs that fail on a VirtualDevice, and what their reports say: the advice is followed and has to hold."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_memtools import GradientCheckpointing, OOMReport, VirtualDevice
from lightning_memtools._torch import KEEPS_CUBLAS_WORKSPACES
from tests.batch_size_models import Samples
from tests.lightning_models import Regression, loader, opaque, trainer
from tests.oom_models import Layers, place_of, sizes_in

MIB = 2**20


@pytest.fixture(autouse=True)
def plenty_of_time(monkeypatch):
    """What a report says must not depend on how busy this machine is."""
    monkeypatch.setattr("lightning_memtools.oom.oom_reporter.CHECKS_S", 600.0)


@dataclass
class Outcome:
    """How a run ended, and what an observer of its own saw on the device when memory ran out."""

    error: torch.OutOfMemoryError | None = None
    report: str = ""
    seen: list[tuple[int, dict[str, int]]] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.error is None


def attempt(
    root: Path,
    capacity: str,
    call: str,
    *callbacks: L.Callback,
    device: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    model: L.LightningModule | None = None,
    **sizes: Any,
) -> Outcome:
    """One call of a Trainer with OOMReport; with "val" fit validates, else it only trains."""
    outcome = Outcome()
    with VirtualDevice(capacity, **(device or {})) as virtual:

        def see(*_: int) -> None:
            outcome.seen.append((virtual.stats().allocated or 0, dict(virtual.composition().by_category)))

        virtual.observe_oom(see)
        module = model or Layers(**sizes)
        evaluates = {} if call == "val" else {"limit_val_batches": 0}
        defaults = {"num_sanity_val_steps": 0, "logger": False, **evaluates}
        run = trainer(root, *callbacks, OOMReport(directory=str(root)), **(defaults | (options or {})))
        try:
            getattr(run, {"val": "fit"}.get(call, call))(module)
        except torch.OutOfMemoryError as error:
            outcome.error = error.with_traceback(None)
            outcome.report = next(root.glob("oom-*.md")).read_text()
    return outcome


@dataclass
class Case:
    """A run that fails: the call and its sizes, where it fails, and what holds most activations there."""

    call: str
    capacity: str
    sizes: dict[str, Any]
    moment: str
    largest: str
    batch: str = "batch"


CASES = {
    "forward": Case("fit", "280MiB", {"batch": 48}, "train, step 0, batch 0, forward", "net.4.0"),
    "backward": Case("fit", "320MiB", {"batch": 48}, "train, step 0, batch 0, backward", "net.4.0"),
    "later_step": Case(
        "fit", "152MiB", {"n": 1, "wide": None, "batch": 64, "width": 2048}, "train, step 1, batch 1, backward",
        "heavy",
    ),
    "validation": Case("val", "320MiB", {"n": 4, "wide": 2, "batch": 24, "val_batch": 96}, "val, batch 0", "net.2.0",
                       "val_batch"),
    "test": Case("test", "320MiB", {"n": 4, "wide": 2, "val_batch": 96}, "test, batch 0", "net.2.0", "val_batch"),
    "predict": Case("predict", "320MiB", {"n": 4, "wide": 2, "val_batch": 96}, "predict, batch 0", "net.2.0",
                    "val_batch"),
}  # fmt: skip


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Every case run once, when it is first asked for."""
    outcomes: dict[str, Outcome] = {}

    def of(name: str) -> Outcome:
        if name not in outcomes:
            case = CASES[name]
            outcomes[name] = attempt(tmp_path_factory.mktemp(name), case.capacity, case.call, **case.sizes)
        return outcomes[name]

    return of


def test_the_page_has_no_block_of_code_which_would_not_wrap_in_tensorboard(failed):
    outcome = failed("forward")
    assert "```" not in outcome.report
    assert not re.search(r"^ {4}", outcome.report, re.MULTILINE)  # indented, that is code too
    assert f"> {outcome.error}".splitlines()[0] in outcome.report.splitlines()


@pytest.mark.parametrize("name", CASES)
def test_the_report_says_where_it_failed_and_what_filled_the_device(name, failed):
    case, outcome = CASES[name], failed(name)
    assert f"({case.moment})" in outcome.report.splitlines()[0]
    assert str(outcome.error).partition("\n")[0] in outcome.report
    allocated, categories = outcome.seen[-1]
    split = sizes_in(outcome.report, "What filled the device")
    assert split.pop("allocated") == pytest.approx(allocated, rel=0.01)
    assert sum(split.values()) == pytest.approx(allocated, rel=0.01)
    for name_, n_bytes in split.items():
        if name_ != "other":
            assert n_bytes == pytest.approx(categories[name_.removesuffix("s")], rel=0.01)
    assert next(iter(sizes_in(outcome.report, "Modules with the most activations"))) == case.largest
    # What the error takes along begins with the same line and names the report, and nothing is printed twice.
    (note,) = outcome.error.__notes__
    assert f"({case.moment})" in note.splitlines()[0]
    assert "Report: " in note.splitlines()[-1]
    assert len(note.splitlines()) == 2


@pytest.mark.parametrize("name", CASES)
def test_the_suggested_batch_size_fits_and_the_next_does_not(name, failed, tmp_path):
    case, outcome = CASES[name], failed(name)
    size = int(re.search(r"`DataLoader\(batch_size=(\d+)\)`\)\. The step then fits", outcome.report)[1])
    assert size > 4
    assert attempt(tmp_path, case.capacity, case.call, **(case.sizes | {case.batch: size})).fits
    assert not attempt(tmp_path, case.capacity, case.call, **(case.sizes | {case.batch: size + 1})).fits


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_suggested_checkpointing_fits(name, failed, tmp_path):
    case, outcome = CASES[name], failed(name)
    (given,) = re.findall(r"`(GradientCheckpointing\(.*?\))`\)\. With .* fits", outcome.report)
    callback = eval(given)  # noqa: S307, our own text
    assert attempt(tmp_path, case.capacity, case.call, callback, **case.sizes).fits


@pytest.mark.parametrize("name", ["forward", "later_step"])
def test_the_suggested_accumulation_fits_and_keeps_the_effective_batch(name, failed, tmp_path):
    case, outcome = CASES[name], failed(name)
    found = re.search(r"`DataLoader\(batch_size=(\d+)\), Trainer\(accumulate_grad_batches=(\d+)\)`", outcome.report)
    size, accumulate = map(int, found.groups())
    assert size * accumulate == case.sizes["batch"]
    options = {"accumulate_grad_batches": accumulate, "max_epochs": accumulate}
    assert attempt(tmp_path, case.capacity, case.call, options=options, **(case.sizes | {"batch": size})).fits


def test_no_accumulation_is_advised_where_lightning_refuses_it(tmp_path):
    case, schedule = CASES["later_step"], GradientAccumulationScheduler({0: 1})
    outcome = attempt(tmp_path, case.capacity, case.call, schedule, model=Layers(**case.sizes))
    assert re.search(r"Use training batches of \d+", outcome.report)
    assert "accumulate_grad_batches" not in outcome.report


class Matrices(Layers):
    """Square layers, whose outputs are half as large under autocast."""

    def __init__(self, width: int = 256, n: int = 6) -> None:
        super().__init__(1, None)
        self.net = nn.Sequential(*(layer for _ in range(n) for layer in (nn.Linear(width, width), nn.GELU())))
        self.width = width

    def loader(self, stage: str) -> Any:
        rows: Any = torch.ones(2 * 3072, self.width)
        return torch.utils.data.DataLoader(rows, batch_size=3072)


def test_bfloat16_fits_where_it_is_said_to(tmp_path):
    outcome = attempt(tmp_path, "52MiB", "fit", model=Matrices())
    assert re.search(r'`Trainer\(precision="bf16-mixed"\)`\)\. The peak falls by .* MiB and fits', outcome.report)
    assert attempt(tmp_path, "52MiB", "fit", model=Matrices(), options={"precision": "bf16-mixed"}).fits


def test_a_process_whose_memory_is_not_enough_for_the_whole_step_is_said_not_to_be(tmp_path):
    """The failed request would have been served, but not the rest of the step."""
    sizes = CASES["test"].sizes
    outcome = attempt(tmp_path, "330MiB", "test", device={"used_by_others": "60MiB"}, **sizes)
    assert "(pid 0, 60.0 MiB)" in outcome.report
    assert re.search(r"60\.0 MiB\. .*does not fit yet", outcome.report)
    assert not attempt(tmp_path / "most", "330MiB", "test", **sizes).fits


class Keeps(Layers):
    """Keeps what every batch has computed, with its graph."""

    def __init__(self, *, keeps: bool = True) -> None:
        super().__init__(batch=4)
        self.keeps = keeps
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        if self.keeps:
            self.kept.append(self.net(batch))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Samples(24, 8, 16384), batch_size=4)


def test_what_grows_from_batch_to_batch_is_the_first_thing_to_look_for(tmp_path):
    outcome = attempt(tmp_path, "120MiB", "fit", model=Keeps())
    assert "(train, step 3, batch 3, forward)" in outcome.report
    # Eight layers keep one output each, and one keeps three times as much before it is cut down: 24 MiB a batch.
    assert re.search(r"^1\. .*grows by 24\.0 MiB.* 2 batches, 48\.0 MiB .*fits\.", outcome.report, re.MULTILINE)
    assert "only delays" in outcome.report
    assert "| other | 72.0 MiB |" in outcome.report
    assert attempt(tmp_path, "120MiB", "fit", model=Keeps(keeps=False)).fits


class OneLong(Matrices):
    """The third batch is the only one that does not fit. Without momentum, all batches begin alike."""

    def train_dataloader(self) -> Any:
        rows = [torch.ones(1, self.width), torch.ones(1, self.width), torch.ones(3000, self.width)]
        return torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]  # a list serves too

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_a_long_batch_and_the_workspaces_of_libraries_do_not_pass_for_growth(tmp_path):
    device = {"cuda_like": True, "cublas_workspace": "8MiB"}
    outcome = attempt(tmp_path, "40MiB", "fit", model=OneLong(), device=device)
    assert "(train, step 2, batch 2, " in outcome.report
    assert "Use training batches of" in outcome.report
    assert "accumulated" not in outcome.report


def test_where_the_traced_step_fits_nothing_is_said_to_be_enough(tmp_path):
    class Takes(L.Callback):
        def on_before_backward(self, *_):
            torch.empty(40 * MIB, dtype=torch.uint8)

    report = attempt(tmp_path, "64MiB", "fit", Takes(), batch=4).report
    assert re.search(r"this step fits: .*28\.0 MiB .*64\.0 MiB", report)
    assert re.search(r"`DataLoader\(batch_size=2\)`\)\. .* by 14\.0 MiB to 14\.0 MiB\. .*not known", report)
    assert re.search(r"^Not checked: a larger GPU \(as far as a trace", report, re.MULTILINE)
    assert not re.search(r"^\d+\. .*(fits|is enough\.|instead of 4 .* does not fit)", report, re.MULTILINE)


# --- the report goes wherever it can


def run_out(root, error=torch.OutOfMemoryError, match="Tried to allocate", *, model=None, logger=False, **report):
    """Train with OOMReport until it raises: the error, and where its note says that the report is."""
    with VirtualDevice("64MiB"), pytest.raises(error, match=match) as caught:
        trainer(root, OOMReport(**report), logger=logger).fit(model or Layers(batch=16))
    return caught.value, place_of(caught.value)


@pytest.mark.parametrize("logger", [False, True])
def test_without_a_directory_it_goes_below_the_log_directory_or_with_no_logger_into_a_temporary_one(logger, tmp_path):
    directory = run_out(tmp_path, logger=logger)[1].parent
    if logger:
        assert directory == tmp_path / "lightning_logs" / "version_0" / "memtools"
    else:
        assert not [*tmp_path.rglob("*.md")]
    assert {path.name for path in directory.iterdir()} == {"oom-train-step0-snapshot.pickle", "oom-train-step0.md"}


def test_where_the_directory_cannot_be_written_to_it_goes_to_a_temporary_file_or_to_the_console(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "taken").write_text("a file")
    _, path = run_out(tmp_path, directory=str(tmp_path / "taken"))
    assert tmp_path not in path.parents
    assert "## What filled the device" in path.read_text()
    assert f"Report: {path}" in capsys.readouterr().out

    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(tmp_path / "taken" / "nowhere"))
    run_out(tmp_path, directory=str(tmp_path / "taken"))
    out = capsys.readouterr().out
    assert "## What filled the device" in out  # the whole page
    assert "could not be written: " in out


DEVICE = "virtual device (64MiB, simulated)"


def test_the_console_says_in_a_few_lines_what_failed_what_filled_it_and_what_to_do(tmp_path, capsys):
    attempt(tmp_path, "64MiB", "fit", batch=16)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    begin = next(at for at, line in enumerate(lines) if line.startswith("Out of memory"))
    facts = [
        (DEVICE, "train, step 0, batch 0, forward", "24.0 MiB", "2.00 MiB free", "Activations take 32.0 MiB"),
        ("1. ", "`DataLoader(batch_size=4), Trainer(accumulate_grad_batches=4)`", "stays 16", "28.0 MiB", "64.0 MiB"),
        ("2. ", "`DataLoader(batch_size=6)`", "42.0 MiB", "64.0 MiB"),
        ("3. Use a larger GPU (RTX 4060 8GB)",),
        (f"Report: {tmp_path / 'oom-train-step0.md'}",),
    ]
    for line, of_line in zip(lines[begin:], facts, strict=True):
        assert [fact for fact in of_line if fact not in line] == []


# --- whatever happens, the original error goes on


class CleansUp(Layers):
    """Runs out of memory again while it handles the first error."""

    def training_step(self, batch, batch_idx):
        try:
            return super().training_step(batch, batch_idx)
        except torch.OutOfMemoryError:
            torch.empty(500 * MIB, dtype=torch.uint8)


class Wraps(Layers):
    def training_step(self, batch, batch_idx):
        try:
            return super().training_step(batch, batch_idx)
        except torch.OutOfMemoryError as error:
            raise ValueError("the step failed") from error


class Library(Layers):
    """Memory runs out and that is caught; a step later, a library fails that no observer hears of."""

    def __init__(self, batch):
        super().__init__(batch=batch // 4)

    def training_step(self, batch, batch_idx):
        if batch_idx:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(500 * MIB, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("model", "error", "match", "facts"),
    [
        (
            CleansUp,
            torch.OutOfMemoryError,
            r"Tried to allocate 500\.00",
            "batch 0, forward): tried to allocate 24.0 MiB",
        ),
        (Wraps, ValueError, "the step failed", "batch 0, forward): tried to allocate 24.0 MiB"),
        (Library, RuntimeError, "ALLOC_FAILED", "(train, step 1, batch 1, forward)."),
    ],
)
def test_the_facts_are_those_of_the_failure_that_ended_the_step(model, error, match, facts, tmp_path):
    _, path = run_out(tmp_path, error, match, model=model(batch=16), directory=str(tmp_path))
    headline = path.read_text().splitlines()[0]
    assert headline.startswith(f"# Out of memory on {DEVICE} (train, ")
    assert facts in headline


def test_a_report_that_fails_is_a_note_and_no_more(tmp_path, monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr("lightning_memtools.oom.oom_reporter.ReportPage", fails)
    (note,) = run_out(tmp_path, directory=str(tmp_path))[0].__notes__
    assert note.startswith("OOMReport")
    assert "failed itself" in note
    assert "KeyError: 'broken'" in note


def test_a_search_for_holders_that_fails_costs_only_its_own_line(tmp_path, monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("checkpoint in main")

    monkeypatch.setattr("lightning_memtools.oom.oom_reporter.find_holdings", fails)
    report = run_out(tmp_path, directory=str(tmp_path))[1].read_text()
    assert "Who holds memory could not be read: KeyError: 'checkpoint in main'." in report
    assert "Use training batches of" in report


def test_other_errors_are_left_alone(tmp_path):
    class Fails(Regression):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("from the user's code")

    with pytest.raises(RuntimeError, match="from the user's code") as caught:
        trainer(tmp_path, OOMReport(directory=str(tmp_path)), logger=False).fit(Fails(), loader())
    assert not hasattr(caught.value, "__notes__")
    assert not [*tmp_path.rglob("oom-*")]


def test_an_error_that_is_caught_is_not_reported(tmp_path, capsys):
    class Halves(Layers):
        def training_step(self, batch, batch_idx):
            with contextlib.suppress(torch.OutOfMemoryError):
                return super().training_step(batch, batch_idx)
            return super().training_step(batch[:4], batch_idx)

    with VirtualDevice("64MiB") as device:
        trainer(tmp_path, OOMReport(), logger=False, limit_val_batches=0).fit(Halves(batch=16))
        assert device.stats().ooms == 2
        assert device.history is None  # and the recording has ended
    assert not [*tmp_path.rglob("oom-*")]
    assert "Out of memory" not in capsys.readouterr().out


def test_what_cannot_be_traced_is_said_not_to_be_checked(tmp_path):
    class Looks(Layers):
        def training_step(self, batch, batch_idx):
            opaque(batch)
            return super().training_step(batch, batch_idx)

    outcome = attempt(tmp_path, "64MiB", "fit", model=Looks(batch=16))
    assert re.search(r"^Not checked: .*smaller batches, .*\(RuntimeError: ", outcome.report, re.MULTILINE)
    assert "Use training batches of" not in outcome.report
    # The recorded history needs no trace.
    assert re.search(r"^- Use expandable segments .*In a replay .* only ", outcome.report, re.MULTILINE)


def test_what_is_not_reached_in_time_is_said_not_to_be_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning_memtools.oom.oom_reporter.CHECKS_S", 0.0)
    outcome = attempt(tmp_path, "64MiB", "fit", batch=16)
    sentence = re.search(r"^Not checked: .*smaller batches, .*time.*", outcome.report, re.MULTILINE)[0]
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert "32.0 MiB" in outcome.report


def test_the_hosts_own_memory_can_run_out_too(tmp_path, capsys):
    class Huge(Regression):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) + torch.empty(1 << 50).sum()

    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        trainer(tmp_path, OOMReport(directory=str(tmp_path)), logger=False).fit(Huge(), loader())
    text = place_of(caught.value).read_text()
    assert re.match(r"# .*on cpu \(train, step 0, batch 0, forward\): .* 4096 TiB", text)
    assert "no statistics" in text
    # What is of no use to a host's memory is not among the advice, and no number is held against what is not known.
    for useless in ("GPU", "Use expandable segments", "EmptyCache", "within", "fits"):
        assert useless not in text.split("## What happened")[0]
    # What the step keeps is known from a trace.
    assert sizes_in(text, "Modules with the most activations")
    assert "DefaultCPUAllocator: can't allocate memory" in text
    assert re.search(r"where \| .*test_oom_report.py:\d+ in training_step: return self.loss", text)


class Blocks(L.LightningModule):
    def __init__(self, batch: int) -> None:
        super().__init__()
        layers = (
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6)
        )
        self.net, self.batch = nn.Sequential(*layers), batch

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2 * self.batch, 128), batch_size=self.batch)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Peak reserved memory is", "ignore:The number of training batches")
def test_smaller_batches_fit_with_the_checkpointing_budget_that_is_given_with_them(tmp_path):
    device = {"cuda_like": True, "cublas_workspace": "8519680B"}
    capacity = "49MiB" if KEEPS_CUBLAS_WORKSPACES else "41MiB"  # less the workspace that newer torch frees
    # Planned anew, a batch of this advice recomputes less, and does not fit.
    outcome = attempt(tmp_path, capacity, "fit", GradientCheckpointing(), model=Blocks(2000), device=device)
    given = re.findall(
        r"`DataLoader\(batch_size=(\d+)\).*?, GradientCheckpointing\(memory_budget=\"(\d+MiB)\", \.\.\.\)`",
        outcome.report,
    )
    assert len(given) == 2  # accumulation, and smaller batches by themselves
    for size, budget in given:
        checkpointing = GradientCheckpointing(memory_budget=budget)
        assert attempt(tmp_path, capacity, "fit", checkpointing, model=Blocks(int(size)), device=device).fits


def test_running_out_before_the_first_step_is_explained_as_far_as_it_goes(tmp_path):
    model = Layers(width=4000)
    outcome = attempt(tmp_path, "32MiB", "fit", model=model)
    assert "(setup)" in outcome.report.splitlines()[0]
    assert re.search(r"^Not checked: .*smaller batches.* \(no step", outcome.report, re.MULTILINE)


def test_without_a_snapshot_fragmentation_is_not_judged(tmp_path):
    text = run_out(tmp_path, snapshot=False, directory=str(tmp_path))[1].read_text()
    assert "## Files" not in text
    assert "Not checked: expandable segments (no history" in text
