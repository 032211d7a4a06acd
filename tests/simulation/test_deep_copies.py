"""Deep copies that a traced step makes are those of a real step, and leave the process alive."""

from __future__ import annotations

import copy
import gc
from functools import partial

import torch
from torch import nn

from lightning_memtools.estimate import estimate_memory
from tests.estimate.networks import mlp

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def with_copies(model, batch):
    """A loss with a teacher that is copied in the step, and copies of tensors."""
    factor = copy.deepcopy(torch.tensor(2.0))
    assert factor.item() == 2.0
    parts = copy.deepcopy({"first": batch[:2], "all": batch})
    assert parts["all"].untyped_storage()._cdata != batch.untyped_storage()._cdata
    teacher = copy.deepcopy(model)
    assert [isinstance(one, nn.Parameter) for one in teacher.parameters()] == [True] * len(list(model.parameters()))
    return (model(batch) - factor * teacher(parts["all"])).square().mean() + parts["first"].sum()


def test_a_step_that_copies_tensors_takes_the_memory_of_the_copies():
    model, batch = mlp(40, 90, 30), torch.zeros(300, 40)
    plain = estimate_memory(model, batch, step=lambda m, b: m(b).square().mean(), optimizer=MOMENTUM)
    # The mode of a fake tensor was copied with it; the second of both removed torch's operators once more, and crashed.
    made, again = (estimate_memory(model, batch, step=with_copies, optimizer=MOMENTUM) for _ in range(2))
    gc.collect()
    assert made.peak_allocated == again.peak_allocated
    assert made.peak_allocated >= plain.peak_allocated + plain.parameter_bytes + batch.nbytes
