"""A device that is like CUDA: operators take what CUDA's kernels take, and compute what the CPU computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

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


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_is_left_when_a_step_is_over(name: str) -> None:
    device = VirtualDevice(cuda_like=True)
    gradients(name, device)
    assert peak(device) > 0
    assert allocated(device) == 0


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


def test_a_result_has_the_room_that_it_has_on_cuda_as_long_as_it_lives() -> None:
    with VirtualDevice(cuda_like=True) as device:
        x = torch.ones(4096, 64, dtype=torch.bfloat16)
        before = allocated(device)
        out, mean, rstd = torch.native_layer_norm(x, [64], None, None, 1e-5)
        # The statistics of halves are floats on CUDA, and halves on the CPU.
        assert allocated(device) - before == x.nbytes + 2 * 4 * 4096
        assert mean.dtype is torch.bfloat16
        del mean, rstd
        assert allocated(device) - before == x.nbytes
        assert device.holds(out)
        assert not out.any()


def test_a_gradient_that_cuda_adds_in_place_is_counted_once():
    index = torch.zeros(40_000, dtype=torch.int64)
    with VirtualDevice(cuda_like=True) as device:
        x = torch.ones(700, 12, requires_grad=True)
        before = allocated(device)
        x[index].sum().backward()
        assert x.grad[0].tolist() == [40_000.0] * 12
        assert allocated(device) - before == 33_792  # 700 * 12 floats, rounded up
        assert device.composition().by_category["gradient"] == 33_792


def test_gradients_that_meet_are_summed_in_place_here_too() -> None:
    def peak_of_backward(device: VirtualDevice) -> int:
        with device:
            x = torch.ones(1000, requires_grad=True)
            y = x.tanh()
            (y.sin() * y.cos() * y.exp()).sum().backward()
        return peak(device)

    assert peak_of_backward(VirtualDevice(cuda_like=True)) == peak_of_backward(VirtualDevice())


def wrong_shape() -> None:
    functional.layer_norm(torch.ones(4, 5), [6])


def wrong_dimension() -> None:
    torch.ones(4, 5).sum(3)


@pytest.mark.parametrize("fail", [wrong_shape, wrong_dimension])
def test_what_is_wrong_is_said_by_the_operator_itself(fail: Callable[[], None]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as plain:
        fail()
    with VirtualDevice(cuda_like=True), pytest.raises(type(plain.value)) as cuda_like:
        fail()
    assert str(cuda_like.value) == str(plain.value)


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


def test_sparse_tensors_are_computed_as_always() -> None:
    with VirtualDevice(cuda_like=True):
        x = torch.eye(30)
        assert x.to_sparse().sum() == 30


def test_tensors_within_tensors_are_counted_by_what_they_hold() -> None:
    rows = torch.arange(6.0).view(3, 2)
    with VirtualDevice(cuda_like=True) as device:
        nested = torch.nested.nested_tensor([rows, rows[:2]], layout=torch.jagged)
        before = allocated(device)
        normed = functional.layer_norm(nested, [2])
        assert allocated(device) > before
        assert torch.equal(normed.values()[:3], functional.layer_norm(rows, [2]))
