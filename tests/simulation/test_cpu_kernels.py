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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "huber_loss", "l1_loss"])
def test_a_reduced_loss_keeps_what_the_cpu_keeps(name, reduction):
    def make():
        x = torch.rand(64, 40)
        return getattr(F, name)(x, torch.rand(64, 40), reduction=reduction), x

    assert as_traced(make) == bytes_kept(make)


@pytest.mark.parametrize("n_steps", [3, 48])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_keeps_its_workspace(n_steps, bidirectional):
    def make():
        return nn.LSTM(16, 24, num_layers=2, bidirectional=bidirectional)(torch.rand(n_steps, 8, 16))

    assert as_traced(make) == bytes_kept(make)


def test_an_lstm_without_gradients_keeps_no_workspace():
    def make():
        with torch.no_grad():
            return nn.LSTM(16, 24)(torch.rand(48, 8, 16))

    assert as_traced(make) == bytes_kept(make)


@pytest.mark.parametrize("shape", [(4, 5, 6), (2, 3, 4, 5)])
def test_batch_norm_returns_contiguous_results(shape):
    def make(x):
        out = F.batch_norm(x.transpose(1, -1), None, None, training=True)
        out.sum().backward()
        return out.stride()

    with simulated(nn.Identity(), VirtualDevice(), TensorExchange(), cuda=False):
        traced = make(torch.rand(shape, requires_grad=True))
    assert traced == make(torch.rand(shape, requires_grad=True))
