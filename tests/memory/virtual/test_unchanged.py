"""Training inside a virtual device is bitwise the same as outside."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.model_zoo import PLAIN, Make, train_step


def train(make: Make, device: VirtualDevice | None) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Weights, buffers, gradients, optimizer state, losses and all random number generators after three steps."""
    torch.manual_seed(3)
    random.seed(3)
    # The legacy generator is what programs around training still use.
    np.random.seed(3)  # noqa: NPY002
    with device or contextlib.nullcontext():
        model, inputs = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            losses.append(train_step(model, inputs, optimizer))
            if device is not None:
                device.composition()
        model.eval()
        with torch.inference_mode():
            losses.append(model(*inputs).clone())
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), *losses]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return tensors, (torch.get_rng_state(), random.getstate(), numpy_state[1].tolist())


# The reentrant checkpoint says so of evaluation, rightly.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("name", PLAIN)
def test_training_is_bitwise_the_same(name: str) -> None:
    tensors, (torch_state, *states) = train(PLAIN[name], None)
    same_tensors, (same_torch_state, *same_states) = train(PLAIN[name], VirtualDevice("1GiB"))
    assert len(tensors) == len(same_tensors) > 5
    for one, other in zip(tensors, same_tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert torch.equal(torch_state, same_torch_state)
    assert states == same_states
