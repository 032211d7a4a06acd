"""What is made of shapes known already is what a FakeTensorMode makes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_memtools import VirtualDevice
from lightning_memtools._torch import fake_mode
from lightning_memtools.simulation.fakes import TensorExchange, borrowed
from lightning_memtools.simulation.simulated import simulated
from tests.checkpointing.foreign_models import made
from tests.simulation.compared_fakes import ComparedWithFakeTensorMode


@pytest.mark.parametrize("name", ["gpt2", "timm_convnext"])
def test_a_step_of_a_model_gets_the_same_tensors(name):
    model, batch = made(name)
    with fake_mode() as mode, borrowed(model, exchange := TensorExchange()):
        batch = {key: exchange(value) if isinstance(value, Tensor) else value for key, value in batch.items()}
        with ComparedWithFakeTensorMode(mode) as both:
            model(batch).backward()
    assert len(both.compared) > 20
    assert both.compared.total() > 300


def test_what_changes_tensors_returns_them_and_counts_as_a_change():
    with simulated(nn.Identity(), VirtualDevice(), TensorExchange(), cuda=False):
        for _ in range(2):
            x = torch.ones(3, 4)
            assert x.add_(1) is x
            assert (x.relu_() is x, x._version) == (True, 2)
            with pytest.raises(RuntimeError, match="shape"):
                x.add_(torch.ones(5, 3, 4))
            assert x.resize_(2, 2).shape == (2, 2)


def test_the_type_of_a_number_and_the_default_type_count():
    with simulated(nn.Identity(), VirtualDevice(), TensorExchange(), cuda=False):
        x = torch.ones(3, dtype=torch.int64)
        for _ in range(2):
            assert [(x * one).dtype for one in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
            assert (x / 2).dtype == torch.float32
            torch.set_default_dtype(torch.float64)
            try:
                assert (x * 1.0).dtype == (x / 2).dtype == torch.empty(2).dtype == torch.float64
            finally:
                torch.set_default_dtype(torch.float32)
