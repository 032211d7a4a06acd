"""What only a GPU can show: nothing waits, the flag works there, the norms need no memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_memtools import default_callbacks
from lightning_memtools.nonfinite.step_guard import MicroBatch, StepGuard
from lightning_memtools.nonfinite.step_rerun import StepConditions, StepRerun
from lightning_memtools.state.random_state import RandomState
from tests.lightning_models import trainer
from tests.nonfinite.gallery import Small, good_data
from tests.nonfinite.test_update_flag import FUSED


@contextlib.contextmanager
def nothing_may_wait() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)).cuda()
    trial = nn.Parameter(torch.ones(2, device="cuda"))
    trial.grad = torch.ones(2, device="cuda")
    try:
        FUSED[name]([trial]).step()
    except RuntimeError as error:
        pytest.skip(f"no fused kernel in this build: {error}")
    return model, FUSED[name](model.parameters())


def step(
    guard: StepGuard, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, number: int
) -> object:
    guard.begin(batch, number, number)
    loss = model(batch).square().mean()
    guard.loss(loss)
    optimizer.zero_grad()
    loss.backward()
    trip = guard.check(optimizer)
    if trip is None:
        optimizer.step()
    return trip


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_the_flag_holds_on_the_device_while_the_host_knows_nothing(name):
    model, optimizer = made(name)
    guard = StepGuard(model, records=False)
    batches = [batch.cuda() for batch in good_data()]
    for number in range(3):
        step(guard, model, optimizer, batches[number], number)
    assert guard.drain() is None
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = [{k: v.clone() for k, v in entries.items()} for entries in optimizer.state.values()]
    dirty = batches[3].clone()
    dirty[2, 1] = torch.nan
    torch.cuda._sleep(2_000_000_000)  # the device is a second behind: nothing can have arrived
    with nothing_may_wait():
        for number, batch in enumerate((dirty, *batches[4:7]), start=3):
            assert step(guard, model, optimizer, batch, number) is None
    trip = guard.drain()
    assert trip.number == 3
    guard.undo(trip)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for entries, kept in zip(optimizer.state.values(), state, strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in entries.items())


class Resident(Small):
    """Its batches are on the device already, so that nothing of its own waits."""

    fused = foreach = False

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=self.fused, foreach=self.foreach)


def waits_of(root: Path, callbacks: list[L.Callback], *, fused: bool, precision: str) -> int:
    """Count how often the host waits in 80 training steps after those that TrainingDoctor watches; some are logged."""

    class Counting(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 25:  # the first steps create state, and at step 20 the doctor reads what it has noted
                torch.cuda.set_sync_debug_mode("warn")
            elif batch_idx == 105:
                torch.cuda.set_sync_debug_mode("default")

    model = Resident()
    model.fused, model.foreach = fused, not fused
    batches = [batch.cuda() for batch in good_data()]
    endless = (batches[i % len(batches)] for i in range(110))
    run = trainer(
        root, *callbacks, Counting(), accelerator="gpu", devices=1, precision=precision, logger=CSVLogger(root),
        log_every_n_steps=10,
    )  # fmt: skip
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.fit(model, endless)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.global_step == 110
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


@pytest.mark.cuda_memory
@pytest.mark.parametrize(
    ("fused", "precision", "bare", "with_ours"),
    [
        (True, "32-true", 0, 0),
        (False, "32-true", 0, 80),
        # The scaler of a fused optimizer passes its flag on the device; else it reads the flag in each step itself.
        (True, "16-mixed", 0, 80),
        (False, "16-mixed", 80, 160),
    ],
)
def test_how_often_the_host_waits_in_eighty_steps(fused, precision, bare, with_ours, tmp_path):
    """On the stubs of CUDA's libraries, where nothing is computed, the scale that is read is 0 as well."""
    assert waits_of(tmp_path, [], fused=fused, precision=precision) == bare
    assert waits_of(tmp_path, default_callbacks(), fused=fused, precision=precision) == with_ours


@pytest.mark.cuda_memory
def test_what_a_replay_needs_is_noted_without_waiting():
    batch = {"x": torch.randn(8, 6, device="cuda"), "mask": torch.ones(1, 6, device="cuda").expand(8, 6)}
    batch["words"] = nn.utils.rnn.pack_sequence([torch.randn(n, 6) for n in (5, 3)]).cuda()
    torch.empty(1000, pin_memory=True)  # the first pinned memory waits
    with nothing_may_wait():
        micro = MicroBatch(0, batch, RandomState.now())
        micro.move_to_host()
    torch.cuda.synchronize()
    assert micro.was_moved
    assert torch.equal(micro.batch["x"], batch["x"].cpu())
    assert micro.batch["x"].device.type == micro.batch["words"].data.device.type == "cpu"
    StepRerun(Small().cuda(), [micro], StepConditions())
    assert (micro.batch["x"].is_cuda, micro.batch["words"].data.is_cuda) == (True, True)
    assert not micro.batch["words"].batch_sizes.is_cuda
