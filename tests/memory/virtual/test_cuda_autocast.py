"""Autocast on a device like CUDA: CUDA's lists of operators, on real tensors that the CPU computes with."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lightning_memtools import VirtualDevice


def types_of_results(device_type):
    source = torch.randn(4, 8)
    with torch.autocast(device_type, dtype=torch.float16):
        product = F.linear(source, torch.randn(8, 8))
        return product.dtype, F.layer_norm(product, [8]).dtype, product.softmax(-1).dtype, product.pow(2).dtype


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
