"""Fake results of CPU operators take the memory of real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memtools import VirtualDevice
from lightning_memtools.simulation.fakes import TensorExchange
from lightning_memtools.simulation.simulated import simulated


def bytes_kept(make):
    """The bytes of memory that a function's result keeps, itself and for backward."""
    with VirtualDevice() as device:
        before = device.stats().allocated
        out = make()
        found = device.stats().allocated - before
        del out
    return found


def as_traced(make):
    with simulated(nn.Identity(), device := VirtualDevice(), TensorExchange(), cuda=False):
        before = device.stats().allocated
        out = make()
        found = device.stats().allocated - before
        del out
    return found


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["mse_loss", "binary_cross_entropy"])
def test_a_reduced_loss_keeps_what_the_cpu_keeps(name, reduction):
    def make():
        x = torch.rand(64, 40)
        return getattr(F, name)(x, torch.rand(64, 40), reduction=reduction), x

    assert as_traced(make) == bytes_kept(make)
