"""Autocast on a device like CUDA: CUDA's lists of operators, on real tensors that the CPU computes with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_memtools import VirtualDevice


def types_of_results(half):
    source = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=half):
        product = F.linear(source, torch.randn(8, 8))
        return product.dtype, F.layer_norm(product, [8]).dtype, product.softmax(-1).dtype, product.pow(2).dtype


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_results_have_the_types_that_they_have_on_cuda(half):
    on_cpu = types_of_results(half)
    with VirtualDevice(cuda_like=True) as device:
        assert types_of_results(half) == (half, torch.float32, torch.float32, torch.float32)
        with device.suspended():
            assert types_of_results(half) == on_cpu
    with VirtualDevice():
        assert types_of_results(half) == on_cpu
    assert types_of_results(half) == on_cpu != (half, torch.float32, torch.float32, torch.float32)


def test_autocast_for_cuda_acts_on_the_tensors_that_stand_for_cudas():
    before = torch.autocast.__init__
    with VirtualDevice(cuda_like=True), torch.autocast("cuda", dtype=torch.float16):
        assert (torch.randn(4, 4) @ torch.randn(4, 4)).dtype is torch.float16
    assert torch.autocast.__init__ is before
