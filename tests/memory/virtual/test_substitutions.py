"""CUDA's path in place of the CPU's: what it saves and what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.reading import allocated, peak


@pytest.mark.parametrize(("cuda_like", "mask_bytes"), [(False, 4000 * 4), (True, 4000)])
def test_dropout_mask_is_of_bools(cuda_like: bool, mask_bytes: int) -> None:
    with VirtualDevice(cuda_like=cuda_like) as device:
        x = torch.ones(4000, requires_grad=True)
        before = allocated(device)
        y = functional.dropout(x, 0.5)
        assert allocated(device) == before + 15872 + 512 + mask_bytes - mask_bytes % -512
        y.sum().backward()
        # The gradient is 2 where the mask let the input through, which is where the output is 2.
        assert x.grad is not None
        assert torch.equal(x.grad, y)
        assert set(y.tolist()) == {0.0, 2.0}
        assert abs(y.mean() - 1) < 0.1


def adam_step(device: VirtualDevice) -> tuple[int, dict[str, int]]:
    """The peak of the second step over what is held, and the optimizer's state."""
    net = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(5)))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    before = allocated(device)
    device.reset_peaks()
    optimizer.step()
    return peak(device) - before, dict(device.composition().by_category)


def test_optimizers_use_foreach_and_keep_step_counts_on_the_host() -> None:
    p = 40448  # 100 * 100 floats
    with VirtualDevice() as device:
        extra, composition = adam_step(device)
        assert composition["optimizer"] == 5 * (2 * p + 512)
        # One parameter after the other: sqrt(v), its quotient, and the denominator of the parameter before.
        assert extra == 3 * p
    with VirtualDevice(cuda_like=True) as device:
        extra, composition = adam_step(device)
        assert composition["optimizer"] == 5 * 2 * p
        # All denominators at once: sqrt(v) of all five parameters.
        assert extra == 5 * p


def types_of_results(device_type):
    source = torch.randn(4, 8)
    with torch.autocast(device_type, dtype=torch.float16):
        product = functional.linear(source, torch.randn(8, 8))
        return product.dtype, functional.layer_norm(product, [8]).dtype, product.softmax(-1).dtype, product.pow(2).dtype


def test_results_have_the_types_that_they_have_on_cuda():
    before, on_cpu = torch.autocast.__init__, types_of_results("cpu")
    with VirtualDevice(cuda_like=True) as device:
        for device_type in ("cpu", "cuda"):
            assert types_of_results(device_type) == (torch.float16, torch.float32, torch.float32, torch.float32)
        with device.suspended():
            assert types_of_results("cpu") == on_cpu
    with VirtualDevice():
        assert types_of_results("cpu") == on_cpu
    assert types_of_results("cpu") == on_cpu != (torch.float16, torch.float32, torch.float32, torch.float32)
    assert torch.autocast.__init__ is before
