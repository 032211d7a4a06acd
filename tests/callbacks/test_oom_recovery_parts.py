"""Surviving a full device: what a step leaves behind, reports, and memory that comes back."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import MemoryMonitor, OOMReport, VirtualDevice, release_failed_step
from lightning_memtools.memory.readers import allocated_bytes
from tests.callbacks.recovery_runs import (
    TIGHT,
    FailsOnce,
    Sequences,
    Watched,
    batches,
    fit,
    one_step,
    prepared,
    recovery,
)
from tests.lightning_models import trainer


def test_a_batch_is_freed_without_a_garbage_collection(tmp_path):
    class Looks(Sequences):
        def __init__(self) -> None:
            super().__init__()
            self.seen_batches: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen_batches.append(weakref.ref(batch[0].untyped_storage()))
            return super().training_step([batch[0].clone(), batch[1]], batch_idx)

    model = Looks()
    data: Any = [lambda: batches((8,))[0]] * 6
    loader: Any = DataLoader(data, batch_size=None, collate_fn=lambda make: make())
    gc.collect()
    gc.disable()
    try:
        trainer(tmp_path, recovery(), logger=False).fit(model, loader)
        alive = sum(reference() is not None for reference in model.seen_batches)
    finally:
        gc.enable()
    assert alive <= 2  # those that the loader fetched last


class Counts(Watched):
    """Writes a buffer in every step from the given one on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since = since
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx >= self.since:
            self.steps += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("since", [0, 3])
def test_a_buffer_that_steps_write_is_restored(since, tmp_path):
    model, data = Counts(since), batches((8,) * 4)
    run = trainer(tmp_path, recovery(), logger=False)
    with FailsOnce(model, 0, batch=3, name="mse_loss"):
        run.fit(model, DataLoader(data, batch_size=None))
    assert float(model.steps) == 3 - since + 2  # the failed attempt is taken back, and two parts have written


@pytest.mark.cuda_memory
def test_a_caught_error_gives_memory_of_a_gpu_back():
    gc.collect()
    torch.cuda.empty_cache()
    model = nn.Linear(1024, 1024, bias=False, device="cuda")
    model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    base = torch.cuda.memory_allocated() - model.weight.nbytes  # with cuBLAS's workspace
    kept = []

    def step() -> None:
        hidden = model(torch.zeros(1024, 1024, device="cuda"))
        kept.append(hidden.detach())
        torch.empty(torch.cuda.mem_get_info()[1] * 2, dtype=torch.uint8, device="cuda")

    try:
        step()
    except torch.OutOfMemoryError as error:
        released = release_failed_step(error)
    assert model.weight.grad is None
    assert torch.cuda.memory_allocated() == released.allocated_bytes == base + kept[0].nbytes
    assert any("`kept`" in holder for holder in released.holders)


@pytest.mark.filterwarnings("ignore:Allocation retries have begun", "ignore:Peak reserved memory is")
def test_the_first_recovery_is_reported_with_what_was_done_and_the_summary_counts_all(tmp_path, capsys):
    logger = CSVLogger(tmp_path)
    callbacks = [MemoryMonitor(), OOMReport(), recovery()]
    fit(tmp_path, Sequences(), *callbacks, capacity=TIGHT, logger=logger)
    (report,) = tmp_path.rglob("oom-*.md")
    text = report.read_text()
    assert report.name == "oom-train-step2.md"
    assert re.search("The run goes on.* ran out of memory and was run again in", text)
    assert "(train, step 2, batch 2, forward)" in text.replace("during ", "") or "step 2" in text
    (summary,) = tmp_path.rglob("memory_summary_fit.md")
    assert re.search("OOMRecovery: 1 batch ran out of memory and ran again in up to", summary.read_text())
    assert "The run goes on." in capsys.readouterr().out


def test_a_caught_error_gives_its_memory_back_and_names_who_holds_the_rest():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(512, 512)
            self.outputs: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            self.outputs.append(x * 2)
            return torch.cat([hidden] * 40)

    with VirtualDevice("64MiB") as device:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        F.mse_loss(model.layer(torch.ones(2, 512)), torch.zeros(2, 512)).backward()
        optimizer.step()
        weights = allocated_bytes(device) - model.layer.weight.nbytes - 2048  # without gradients
        batch = torch.zeros(1024, 512)
        try:
            model(batch).sum().backward()
        except torch.OutOfMemoryError as error:
            released = release_failed_step(error)
        assert model.layer.weight.grad is None
        assert released.allocated_bytes == allocated_bytes(device)
        assert released.freed_bytes > 2 * 2**20
        assert released.owned_bytes == weights
        text = str(released)
        assert "2.00 MiB by Net.outputs[0]" in text
        assert "2.00 MiB by `batch` in test_a_caught_error" in text
        assert released.allocated_bytes == weights + 2 * batch.nbytes


def test_after_a_run_that_failed_only_weights_and_states_are_left(tmp_path):
    gc.collect()
    with VirtualDevice(TIGHT) as device:
        model = Sequences()
        run = trainer(tmp_path, OOMReport(directory=str(tmp_path)), logger=False)
        data = DataLoader(batches(), batch_size=None)
        try:
            run.fit(model, data)
        except torch.OutOfMemoryError as error:
            released = release_failed_step(error)
        assert released.allocated_bytes == allocated_bytes(device)
        assert released.owned_bytes == 40 * 2**10  # weights and momentum
        # The batch is the loader's own, and numbers that Lightning logged take a block each.
        others = [holder for holder in released.holders if not ("dataset" in holder or "['batch']" in holder)]
        assert all(holder.startswith("512 B") for holder in others), others


def test_a_recovered_step_leaves_nothing_on_the_device(tmp_path):
    left = []
    for at in (None, 20):
        with VirtualDevice() as device:
            model = prepared()
            one_step(tmp_path, model, recovery(), at=at)
            gc.collect()
            left.append(device.stats().allocated)
    assert left[0] == left[1]
