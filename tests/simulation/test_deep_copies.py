"""Deep copies that a traced step makes are those of a real step, and leave the process alive."""

from __future__ import annotations

import copy
import subprocess
import sys
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
    made = estimate_memory(model, batch, step=with_copies, optimizer=MOMENTUM)
    assert made.peak_allocated >= plain.peak_allocated + plain.parameter_bytes + batch.nbytes


CRASHED = """
import copy, gc, torch
from lightning_memtools import estimate_memory

def step(model, batch):
    return model(batch * copy.deepcopy(torch.tensor(2.0))).sum() + copy.deepcopy(batch).sum()

print([estimate_memory(torch.nn.Linear(8, 8), torch.zeros(4, 8), step=step).peak_allocated for _ in range(3)])
gc.collect()
"""


def test_a_process_survives_copies_in_traced_steps():
    """The mode of a fake tensor was copied with it, and the second of both removed torch's operators once more."""
    done = subprocess.run([sys.executable, "-c", CRASHED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.strip("[]\n").split(", "))) == 1
