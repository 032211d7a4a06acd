"""Gradients that meet in backward."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.virtual import accounting_mode


def blocks_of_backward(loss_of, make):
    device = VirtualDevice(record=True)
    with device:
        leaf = make((256, 256)).requires_grad_()
        loss = loss_of(leaf * 2)
        before = device._allocator.memory_stats()["allocation.all.allocated"]
        loss.backward()
    return device._allocator.memory_stats()["allocation.all.allocated"] - before


def exclusive(hidden):
    """Two gradients of its own for each use: the first is added to in place."""
    return (hidden.sin() * hidden.cos()).sum()


def shared(hidden):
    """Both uses get the same gradient, but the second has let go of it when they are summed."""
    return ((hidden + hidden.sin()) * 3).sum()


def kept(hidden):
    """A hook keeps the first gradient, so the sum needs a new tensor."""
    first, second = hidden + 0, hidden + 0
    held = []
    second.register_hook(held.append)
    return (first.sin() * second.cos()).sum()


@pytest.mark.parametrize(("loss_of", "n_saved"), [(exclusive, 1), (shared, 1), (kept, 0)])
@pytest.mark.parametrize("fake", [False, True])
def test_the_sum_takes_a_block_only_where_autograd_cannot_reuse_a_gradient(loss_of, n_saved, fake, monkeypatch):
    def blocks():
        if not fake:
            return blocks_of_backward(loss_of, torch.zeros)
        with FakeTensorMode():
            return blocks_of_backward(loss_of, torch.empty)

    in_place = blocks()
    monkeypatch.setattr(accounting_mode, "is_gradient_sum", lambda *_: False)
    assert blocks() - in_place == n_saved


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
