"""A caught out-of-memory error gives its memory back, and what holds the rest is named."""

from __future__ import annotations

import gc
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import OOMReport, VirtualDevice, release_failed_step
from lightning_memtools.memory.memory_releaser import free_failed_backward
from tests.callbacks.recovery_runs import Sequences, batches
from tests.lightning_models import trainer


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
        weights = device.stats().allocated - model.layer.weight.nbytes - 2048  # without gradients
        batch = torch.zeros(1024, 512)
        try:
            model(batch).sum().backward()
        except torch.OutOfMemoryError as error:
            released = release_failed_step(error)
        assert model.layer.weight.grad is None
        assert released.allocated_bytes == device.stats().allocated
        assert released.freed_bytes > 2 * 2**20
        assert released.owned_bytes == weights
        text = str(released)
        assert "2.00 MiB by Net.outputs[0]" in text
        assert "2.00 MiB by `batch` in test_a_caught_error" in text
        assert released.allocated_bytes == weights + 2 * batch.nbytes


def test_a_second_run_fits_after_a_crash_that_oom_report_saw_though_the_error_is_kept(tmp_path):
    left = {}
    data = DataLoader(batches((64, 3_000)), batch_size=None)
    for name in ("with", "without"):
        callbacks = [OOMReport(directory=str(tmp_path), snapshot=False)] if name == "with" else []
        gc.collect()
        with VirtualDevice("50MiB") as device:
            model = Sequences()
            try:
                trainer(tmp_path, *callbacks, logger=False).fit(model, data)
            except torch.OutOfMemoryError as error:
                kept = error  # as a notebook does
            left[name] = device.stats().allocated
            if name == "with":
                again = trainer(tmp_path, logger=False)
                again.fit(model, DataLoader(batches((64, 1_500, 1_500)), batch_size=None))
                assert again.global_step == 3
            del kept
    assert left["without"] > 20 * 2**20  # two activations
    assert left["with"] < 3 * 2**20  # weights, momentum and the batch that the loader still holds


def test_a_backward_that_ran_out_of_memory_is_released():
    with VirtualDevice("52MiB") as device:

        def fail():
            x = torch.ones(1 << 22, requires_grad=True)
            loss = x.tanh().sum() + x.sigmoid().sum()
            with pytest.raises(torch.OutOfMemoryError) as raised:
                loss.backward()
            traceback.clear_frames(raised.value.__traceback__)

        fail()
        gc.collect()
        assert device.stats().allocated >= 16 << 20, "autograd's queue keeps what was still to be run"
        free_failed_backward()
        assert device.stats().allocated == 0
