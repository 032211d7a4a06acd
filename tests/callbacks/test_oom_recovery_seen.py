"""What others see of a batch that is run in parts: one step; and what it leaves behind: nothing."""

from __future__ import annotations

import gc
import random
import re
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_memtools import HaltOnNaN, MemoryMonitor, NonFiniteError, OOMRecovery, OOMReport, VirtualDevice
from lightning_memtools.recovery.step_recovery import StepRecovery
from tests.callbacks.recovery_runs import (
    TIGHT,
    FailsOnce,
    Sequences,
    StepResult,
    Timed,
    Watched,
    batches,
    closure,
    fit,
    recovery,
)
from tests.lightning_models import trainer

pytestmark = pytest.mark.filterwarnings("ignore:OOMRecovery. A batch")

ONCE_A_STEP = ("on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end")


class Notes(L.Callback):
    """Notes the hooks of each step with what the Trainer counts, and what the progress bar shows."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        for name in ONCE_A_STEP:
            setattr(self, name, self._noting(name))

    def _noting(self, name: str) -> Any:
        def note(trainer: Any, *arguments: Any, **_: Any) -> None:
            batch = [len(one[0]) for one in arguments if isinstance(one, list)]
            numbers = [one for one in arguments if isinstance(one, int)]
            loop = trainer.fit_loop.epoch_loop
            shown = trainer.progress_bar_callback.train_progress_bar.n
            self.seen.append((name, batch, numbers, trainer.global_step, loop.batch_idx, shown))

        return note


class Draws(Watched):
    """Draws from three random streams in each step, and notes what is allocated when one begins."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Any] = []
        self.allocated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn.append((batch_idx, random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002, S311
        if batch_idx == 2 and len(batch[0]) in {8, 16}:
            gc.collect()  # what Lightning keeps of logged values is in cycles
        device = VirtualDevice.current()
        assert device is not None
        self.allocated.append(device.stats().allocated or 0)
        return super().training_step(batch, batch_idx)


def run_of(root: Any, at: int | None) -> tuple[Draws, Notes]:
    L.seed_everything(3, verbose=False)
    notes = Notes()
    callbacks = [notes, TQDMProgressBar(), recovery()]
    run = trainer(root, *callbacks, logger=False, enable_progress_bar=True)
    with VirtualDevice():
        model = Draws()
        with FailsOnce(model, 10**9 if at is None else at, batch=2):
            run.fit(model, DataLoader(batches((8,) * 4), batch_size=None))
    return model, notes


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("healthy"), None)


@pytest.fixture(scope="module")
def recovered(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("recovered"), 12)


def test_hooks_counters_and_the_progress_bar_see_one_step(healthy, recovered):
    model, notes = recovered
    assert model.seen == [16, 16, 16, 8, 8, 8, 8]
    assert notes.seen == healthy[1].seen
    assert [one[0] for one in notes.seen] == [*ONCE_A_STEP] * 4
    assert [one[3:] for one in notes.seen if one[0] == "on_train_batch_end"] == [(i + 1, i, i) for i in range(4)]


def test_every_random_stream_goes_on_from_where_the_batch_began(healthy, recovered):
    whole = {one[0]: one for one in healthy[0].drawn}
    for index in range(3):  # the streams of the parts differ from then on
        assert next(one for one in recovered[0].drawn if one[0] == index) == whole[index]
    again = [one for one in recovered[0].drawn if one == whole[2]]
    assert len(again) == 2  # the attempt that failed, and the first part


def test_between_attempts_memory_is_that_of_the_beginning_of_the_step(recovered):
    model, _ = recovered
    failed, first_part = 2, 3
    # The gradients of the step before are gone by then, which a whole batch takes away after its forward pass.
    gradients = sum(-(-parameter.nbytes // 512) * 512 for parameter in model.parameters())
    assert model.allocated[first_part] == model.allocated[failed] - gradients


class TakesLogarithm(Timed):
    """The loss of a batch with a negative sample is NaN."""

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + torch.log(batch[1][:, 0, 0]).mean() * 0.01


def test_a_nan_in_a_part_is_found_in_the_whole_batch(tmp_path):
    torch.manual_seed(3)
    data = batches((8,) * 3)
    for _, y in data:
        y.abs_()
    data[1][1][13, 0, 0] = -1.0
    model = TakesLogarithm()
    run = trainer(tmp_path, recovery(), HaltOnNaN(directory=str(tmp_path)), logger=False)
    with FailsOnce(model, 12, batch=1), pytest.raises(NonFiniteError, match="loss is nan at step 1 ") as caught:
        run.fit(model, DataLoader(data, batch_size=None))
    assert model.seen[:4] == [16, 16, 8, 8]
    assert "torch.log in TakesLogarithm.loss" in str(caught.value)


class Manual(Sequences):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_manual_optimization_is_named_when_fit_begins(tmp_path, capsys):
    data = DataLoader(batches((8,)), batch_size=None)
    trainer(tmp_path, recovery(), logger=False).fit(Manual(), data)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("in parts: in manual opt") == 1


def test_fsdp_is_refused_at_setup_with_the_reason(tmp_path):
    run = trainer(tmp_path, recovery(), logger=False, strategy=ModelParallelStrategy(1, 1), devices=1)
    model = Sequences()
    try:
        with pytest.raises(ValueError, match=r"OOMRecovery .* ModelParallelStrategy: .*strategy='ddp'"):
            run.fit(model, DataLoader(batches((8,)), batch_size=None))
    finally:
        torch.distributed.destroy_process_group()
    assert model.seen == []


def test_weights_that_are_updated_in_the_backward_pass_are_not_touched_by_a_second_attempt(tmp_path, capsys):
    ends = []

    def update(parameter: Any) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)

    for callbacks in ([], [recovery()]):
        torch.manual_seed(3)
        model = Watched()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        with FailsOnce(model, 40, batch=1), pytest.raises(torch.OutOfMemoryError) as caught:
            trainer(tmp_path, *callbacks, logger=False).fit(model, DataLoader(batches((8, 8)), batch_size=None))
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert "register_post_accumulate_grad_hook was called" in caught.value.__notes__[0]
    assert "register_post_accumulate_grad_hook was called" in " ".join(capsys.readouterr().out.split())
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.filterwarnings("ignore:Allocation retries have begun", "ignore:Peak reserved memory is")
def test_the_first_recovery_is_warned_of_logged_and_reported_and_the_summary_counts_all(tmp_path, capsys):
    logger = CSVLogger(tmp_path)
    callbacks = [MemoryMonitor(), OOMReport(), OOMRecovery(loss="mean")]
    with pytest.warns(UserWarning, match="OOMRecovery: A batch ran out of memory and was run again in"):
        fit(tmp_path, Sequences(), *callbacks, capacity=TIGHT, logger=logger)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "memory/oom_recoveries" in rows
    assert "memory/micro_batches" in rows
    (report,) = tmp_path.rglob("oom-*.md")
    assert report.name == "oom-train-step2.md"
    assert re.search("The run goes on.* ran out of memory and was run again in", report.read_text())
    (summary,) = tmp_path.rglob("memory_summary_fit.md")
    assert re.search("OOMRecovery: 1 batch ran out of memory and ran again in up to", summary.read_text())
    assert "The run goes on." in capsys.readouterr().out


@pytest.mark.cuda_memory
def test_a_healthy_step_waits_for_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1)).cuda()
    model.register_buffer("constant", torch.ones(3, device="cuda"))
    device = torch.device("cuda")
    options: Any = {"max_splits": 8, "loss": "mean", "allow_batch_norm": False}
    recovering = StepRecovery(model, device, tell=pytest.fail, **options)
    batch = torch.zeros(16, 8, device="cuda")
    sizes: list[int] = []

    def forward(part: Any) -> Any:
        sizes.append(len(part))
        return StepResult(model(part).mean())

    step = closure(batch, forward)
    recovering.run(step)
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            batch.sum().item()
        for _ in range(20):
            recovering.run(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sizes == [16] * 21
