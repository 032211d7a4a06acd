"""Attention on a device like CUDA: the memory is that of CUDA's fused kernels, and the numbers are the CPU's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_memtools import VirtualDevice
from lightning_memtools._torch import EFFICIENT_ATTENTION_MAKES_SEEDS

LENGTH = 128
MASKS = {
    "no mask": lambda: None,
    "bool": lambda: torch.rand(2, 1, LENGTH, LENGTH) > 0.3,
    "float": lambda: torch.randn(LENGTH, LENGTH),
}


def attended(dropout, mask):
    """The output and the gradients of one attention over views of one tensor, as models compute them."""
    torch.manual_seed(0)
    given = MASKS[mask]()
    both = torch.randn(2, LENGTH, 3, 4, 16, requires_grad=True)
    query, key, value = (both + 0).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=given, dropout_p=dropout)
    merged = out.transpose(1, 2).reshape(2, LENGTH, 64)
    (gradient,) = torch.autograd.grad(merged.square().sum(), both)
    return merged.detach(), gradient, torch.rand(3)


def peak(dropout, mask="no mask"):
    with VirtualDevice(cuda_like=True) as device:
        attended(dropout, mask)
        return device.stats().peak_allocated


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_numbers_and_random_numbers_are_those_without_the_device(dropout, mask):
    plain = attended(dropout, mask)
    with VirtualDevice(cuda_like=True):
        like_cuda = attended(dropout, mask)
    assert all(torch.equal(one, other) for one, other in zip(plain, like_cuda, strict=True))


def test_dropout_keeps_no_scores():
    scores = 2 * 4 * LENGTH * LENGTH * 4
    with VirtualDevice() as as_on_a_cpu:
        attended(0.2, "no mask")
    assert as_on_a_cpu.stats().peak_allocated >= peak(0.2) + scores
    # From torch 2.14 on, the kernel keeps a seed and an offset where there is no dropout.
    assert peak(0.0) - peak(0.2) == (2 * 512 if EFFICIENT_ATTENTION_MAKES_SEEDS else 0)
