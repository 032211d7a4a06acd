"""Attention on a device like CUDA: the memory is that of CUDA's fused kernels, and the numbers are the CPU's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_memtools import VirtualDevice

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
    assert peak(0.2) == peak(0.0)


def test_a_mask_with_a_gradient_is_left_to_the_cpu():
    query = torch.randn(1, 2, 8, 8, requires_grad=True)
    mask = torch.zeros(8, 8, requires_grad=True)
    gradients = []
    for device in (VirtualDevice(), VirtualDevice(cuda_like=True)):
        with device:
            F.scaled_dot_product_attention(query, query, query, mask).square().sum().backward()
        gradients.append((query.grad, mask.grad))
        query.grad = mask.grad = None
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_the_function_is_torchs_own_again_afterwards():
    before = F.scaled_dot_product_attention
    with VirtualDevice(cuda_like=True):
        assert F.scaled_dot_product_attention is not before
    assert F.scaled_dot_product_attention is before
