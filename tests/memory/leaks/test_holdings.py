"""Who holds what lies on a device beside the model in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.leaks.holder_search import Holding, names_of_run
from lightning_memtools.memory.leaks.holdings import Holdings, find_holdings
from lightning_memtools.reporting.held_words import holding_in_words

MIB = 2**20


class Model(nn.Module):
    """The model in training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.kept: Any = None


def mib(n: int) -> Tensor:
    return torch.zeros(n * MIB // 4)


def held_by(model: Model, device: VirtualDevice, **options: Any) -> Holdings:
    return find_holdings(device.holds, model, [], None, names_of_run(model, []), **options)


def only(held: Holdings) -> Holding:
    (one,) = held.found
    return one


def test_a_view_counts_with_all_of_its_storage():
    with VirtualDevice() as device:
        model = Model()
        model.kept = [mib(4)[:1] for _ in range(3)]
        one = only(held_by(model, device))
    assert (one.path, one.n_bytes, one.piles_up, one.is_of_run) == ("Model.kept", 12 * MIB, True, True)
    assert holding_in_words(one).startswith("`Model.kept`, a list of 3 tensors, 12.0 MiB")


def test_what_a_graph_has_saved_counts_with_the_tensor_that_carries_it():
    with VirtualDevice() as device:
        model = Model()
        weight = nn.Parameter(torch.ones(MIB // 4))
        model.weight = weight
        model.kept = [(weight * 2).exp().sum() for _ in range(2)]  # each saves the 1 MiB of its exponential
        one = only(held_by(model, device))
    assert one.with_graph == 2
    assert 2 * MIB <= one.n_bytes < 3 * MIB
    assert "with autograd graphs" in holding_in_words(one)


def test_the_models_own_tensors_its_batch_and_what_is_young_do_not_count():
    with VirtualDevice() as device:
        model = Model()
        model.register_buffer("table", mib(4))
        model.kept, batch, young = [mib(2)], mib(8), mib(1)
        held = find_holdings(device.holds, model, [], batch, names_of_run(model, []), is_young=lambda one: one is young)
    assert [(one.path, one.n_bytes) for one in held.found] == [("Model.kept", 2 * MIB)]


def test_averaged_weights_in_a_list_are_no_pile_that_grows():
    """As torch_ema and many others keep them."""
    with VirtualDevice() as device:
        model = Model()
        model.net = nn.Linear(512, 512)
        model.averaged = [parameter.detach().clone() for parameter in model.parameters()]
        one = only(held_by(model, device))
    assert (one.piles_up, one.is_left_over, "the copy of the weights" in holding_in_words(one)) == (False, False, True)
