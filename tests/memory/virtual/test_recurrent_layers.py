"""Recurrent layers on a device like CUDA: the memory is cuDNN's, and the numbers are the CPU's."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_memtools import VirtualDevice

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
LENGTHS = torch.tensor([5, 5, 4, 3, 3, 2, 1])


def trained(kind, device, *, packed=False, **options):
    """The output, the final states and all gradients of a layer, and a random number drawn afterwards."""
    torch.manual_seed(0)
    layer = getattr(nn, kind)(12, 20, **options)
    source = torch.randn((7, 5, 12) if options["batch_first"] else (5, 7, 12), requires_grad=True)
    with device or nullcontext():
        if device is not None:
            device.track(layer)
        given = pack_padded_sequence(source, LENGTHS, options["batch_first"]) if packed else source
        out, states = layer(given)
        states = states if isinstance(states, tuple) else (states,)
        out = out.data if packed else out
        loss = out.square().sum() + sum(one.sum() for one in states)
        gradients = torch.autograd.grad(loss, [source, *layer.parameters()])
    return [out.detach(), *states, *gradients, torch.rand(1)]


@pytest.mark.parametrize(("kind", "projected"), [("LSTM", 0), ("LSTM", 6), ("GRU", 0), ("RNN", 0)])
@pytest.mark.parametrize("packed", [False, True])
def test_numbers_and_random_numbers_are_those_without_the_device(kind, projected, packed):
    for batch_first, both_ways, bias, (n_layers, dropout) in product(
        [False, True], [False, True], [False, True], [(1, 0.0), (2, 0.5)]
    ):
        options = {"num_layers": n_layers, "dropout": dropout, "batch_first": batch_first, "bidirectional": both_ways}
        options |= {"bias": bias} | ({"proj_size": projected} if projected else {})
        plain = trained(kind, None, packed=packed, **options)
        like_cuda = trained(kind, VirtualDevice(cuda_like=True), packed=packed, **options)
        assert all(torch.equal(one, other) for one, other in zip(plain, like_cuda, strict=True)), options
