"""A device that is like CUDA: operators take what CUDA's kernels take, and compute what the CPU computes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from lightning_memtools.memory.cuda_ops.autocast import cuda_autocast
from lightning_memtools.memory.cuda_ops.reductions import workspaces
from lightning_memtools.memory.sizes import GpuShape
from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.model_zoo import PLAIN, train_step
from tests.memory.virtual.reading import allocated, peak

WITHOUT_DROPOUT = sorted(set(PLAIN) - {"dropout", "transformer_encoder"})  # dropout draws other numbers there


def gradients(name: str, device: VirtualDevice | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with device or contextlib.nullcontext():
        model, inputs = PLAIN[name]()
        loss = train_step(model, inputs, None)
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("name", WITHOUT_DROPOUT)
def test_numbers_are_those_of_the_cpu_to_the_bit(name: str) -> None:
    """Under autocast, those of the CPU that casts by CUDA's lists."""
    with cuda_autocast() if name == "autocast" else contextlib.nullcontext():
        plain = gradients(name, None)
    cuda_like = gradients(name, VirtualDevice(cuda_like=True))
    assert len(plain) == len(cuda_like) > 2
    assert all(torch.equal(one, other) for one, other in zip(plain, cuda_like, strict=True))


def test_a_reduction_takes_the_buffers_of_its_blocks_for_a_moment() -> None:
    with VirtualDevice("RTX 3060", cuda_like=True) as device:
        x = torch.zeros(8192, 1024)
        before = allocated(device)
        total = x.sum(0)
        buffers = workspaces(x, [0], GpuShape(28, 1536, (8, 6)), part_bytes=4)
        assert 20 * 2**20 < buffers[0] < 22 * 2**20
        assert allocated(device) - before == 4 * 1024
        # The allocator asks for whole 2 MiB, and what is left of them is too small to split.
        assert peak(device) - before == 4 * 1024 + 22 * 2**20 + 512
        assert torch.equal(total, torch.zeros(1024))


def test_a_workspace_can_be_what_does_not_fit() -> None:
    rows = nn.Parameter(torch.zeros(8192, 1024))
    with VirtualDevice("48MiB") as device:
        device.track(rows)
        rows.sum(0)
    with VirtualDevice("48MiB", cuda_like=True) as device:
        device.track(rows)
        held = allocated(device)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            rows.sum(0)
        assert allocated(device) == held
