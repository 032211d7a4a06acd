"""Running out of memory: the error's words, where it comes, and that nothing stays behind."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.cuda_texts import MARK
from tests.memory.virtual.reading import allocated

MIB = 2**20
host = torch.ones(4 * MIB)


def test_the_message_has_the_wording_of_cudas_error() -> None:
    with VirtualDevice("64MiB", context="4MiB", used_by_others="5MiB") as device:
        kept = [torch.empty(30 * MIB, dtype=torch.uint8), torch.empty(512 * 3, dtype=torch.uint8)]
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(23 * MIB, dtype=torch.uint8)
        assert device.stats().ooms == 1
        assert device.stats().alloc_retries == 1
        del kept
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 24.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which 23.00 MiB "
        "is free. Process 0 has 5.00 MiB memory in use. Including non-PyTorch memory, this process has 36.00 MiB "
        "memory in use. Of the allocated memory 30.00 MiB is allocated by PyTorch, and 2.00 MiB is reserved by PyTorch "
        "but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf) "
        "(simulated by lightning_memtools.VirtualDevice)"
    )


class Training:
    """A net whose memory is in forward, in backward or in the optimizer's step, as asked for."""

    def __init__(self, phase: str) -> None:
        # Wide activations run out in forward; wide weights in backward, when their gradients come, or after it.
        width = {"forward": 64, "backward": 3000, "step": 3000}[phase]
        self.net = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def step(self, rows: int) -> None:
        loss = self.net(torch.ones(rows, 64)).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


# Capacity, rows that do not fit, rows that do.
PHASES = {
    "forward": ("24MiB", 40_000, 1000),
    # The hidden layer's output takes 9 MB: twice in forward, before and after tanh; three times in backward.
    "backward": ("24MiB", 750, 64),
    # Weights and their gradients take a segment of 2 MiB each; Adam's moments would need two more.
    "step": ("7MiB", 1, None),
}


@pytest.mark.parametrize("phase", PHASES)
def test_after_an_error_in_each_phase_no_memory_remains_allocated(phase: str) -> None:
    capacity, too_many, fits = PHASES[phase]
    with VirtualDevice(capacity) as device:
        training = Training(phase)
        before = allocated(device)
        for attempt in range(2):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                training.step(too_many)
            frames = traceback.extract_tb(caught.value.__traceback__)
            functions = {frame.name for frame in frames}
            assert ("forward" in functions) == (phase == "forward")
            assert ("backward" in functions) == (phase == "backward")
            assert any(frame.filename.endswith("adam.py") for frame in frames) == (phase == "step")
            # What the frames hold lives as long as they do, as on a GPU.
            assert allocated(device) > before
            traceback.clear_frames(caught.value.__traceback__)
            del caught
            gc.collect()
            training.optimizer.zero_grad()
            training.optimizer.state.clear()
            assert allocated(device) == before, attempt
            assert device.stats().ooms == attempt + 1
        if fits is not None:
            training.step(fits)
            assert device.composition().by_category["optimizer"] > 0
        x = torch.ones(1)
        assert device.composition().by_category["other"] == 512
        del x


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0] * 4 * MIB),
        lambda: torch.empty(0).resize_(4 * MIB),
        lambda: torch.add(host, 1, out=torch.empty(0)),
        lambda: torch.empty(0).untyped_storage().resize_(16 * MIB),
        lambda: torch._foreach_add([host], 1),
    ],
)
def test_an_error_from_every_kind_of_allocation_leaves_nothing_allocated(make: Callable[[], Any]) -> None:
    with VirtualDevice("8MiB") as device:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 16\.00 MiB"):
            make()
        assert allocated(device) == 0
        assert device.stats().ooms == 1


def test_observers_are_told_before_the_error_unwinds() -> None:
    told: list[Any] = []
    with VirtualDevice("64MiB", used_by_others="4MiB") as device:

        def observe(*arguments: int) -> None:
            # The big activation is still there, and what observers make does not count.
            torch.ones(10 * MIB)
            told.append((arguments, allocated(device), device.composition().by_category["activation"]))

        handle = device.observe_oom(observe)

        class Net(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                big = x.repeat(40 * MIB)
                return torch.cat([big, big])

        x = torch.ones(1, dtype=torch.uint8)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                Net()(x)
            handle.remove()
        assert told == [((0, 80 * MIB, 64 * MIB, 18 * MIB), 40 * MIB + 512, 40 * MIB)]


@pytest.mark.cuda_memory
def test_the_error_has_the_wording_of_the_real_one() -> None:
    clean_up()
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError) as real:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    # Fake tensors: nobody has this much host memory.
    with FakeTensorMode(), VirtualDevice(f"{total}B"), pytest.raises(torch.OutOfMemoryError) as simulated:
        torch.empty(2 * total, dtype=torch.uint8)
    assert without_figures(str(simulated.value).removesuffix(f" {MARK}")) == without_figures(str(real.value))


def clean_up() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def without_figures(text: str) -> str:
    """The words between the figures; what other processes there are differs from machine to machine."""
    text = re.sub(r" Process \d+ has [\d.]+ \w+ memory in use\.", "", text)
    return re.sub(r"[\d.]+ (bytes|[KMG]iB)", "#", text)
