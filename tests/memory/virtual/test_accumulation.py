"""Gradients that meet in backward."""

from __future__ import annotations

import torch

from lightning_memtools import VirtualDevice


def test_a_gradient_that_somebody_holds_is_not_written_to():
    held = []
    with VirtualDevice():
        leaf = torch.ones(4, requires_grad=True)
        hidden = leaf * 2
        first, second = hidden + 0, hidden + 0
        first.register_hook(held.append)
        second.register_hook(held.append)
        (first * 3 + second * 5).sum().backward()
    assert sorted(gradient[0].item() for gradient in held) == [3.0, 5.0]
    assert torch.equal(leaf.grad, torch.full((4,), 16.0))
