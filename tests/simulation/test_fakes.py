"""The user's objects, before and after."""

from __future__ import annotations

import collections
import copy
import gc
import random
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import torchmetrics
from torch import nn

from lightning_memtools._torch import FakeTensor, fake_mode
from lightning_memtools.estimate import estimate_memory
from lightning_memtools.simulation.fakes import TensorExchange, borrowed
from lightning_memtools.state.random_state import RandomState
from tests.estimate.networks import mlp, total


class Keeps(nn.Module):
    """Changes itself at every call, in every way that a user might."""

    of_all: ClassVar[list[torch.Tensor]] = [torch.ones(2)]
    latest: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.other = self.layer.weight  # one parameter under two names
        self.constant = torch.arange(8.0)  # no buffer
        self.seen = []
        self.by_name = {"last": torch.zeros(2), "deep": [{"er": 1}]}
        self.queue = collections.deque([torch.ones(3)], maxlen=2)
        self.pair = (torch.zeros(1), "word")
        self.nested = {"a": [(torch.ones(2),)], "b": [nn.Parameter(torch.ones(2))]}
        self.names = {"a"}
        self.helper = Helper()
        self.metric = torchmetrics.MeanMetric()

    def forward(self, rows):
        hidden = self.norm(self.layer(rows)) + self.constant
        self.seen.append(hidden)
        self.by_name["last"] = hidden
        self.by_name["deep"][0]["er"] += 1
        self.queue.append(hidden)
        self.pair = (hidden, "other")
        self.names.add("b")
        self.of_all.append(hidden)
        self.latest["hidden"] = hidden
        self.helper.count += 1
        self.helper.total = self.helper.total + hidden.sum().detach()
        self.metric.update(hidden.detach().mean())
        self.new = 1
        torch.manual_seed(0)
        random.random()  # noqa: S311, the global streams are meant
        np.random.rand()  # noqa: NPY002
        if hasattr(self, "gone"):
            del self.gone
        return hidden


class Helper:
    def __init__(self):
        self.count = 0
        self.total = torch.zeros(())


def everything(model):
    """What a module refers to, by identity; and the values of its tensors."""
    found = []
    for module in model.modules():
        for name, value in vars(module).items():
            found.append((name, id(value)))
            if isinstance(value, dict):
                found += [(key, id(item)) for key, item in value.items()]
            elif isinstance(value, (list, tuple, collections.deque)):
                found += [(name, id(item)) for item in value]
    return found


def test_the_module_is_left_exactly_as_it_was():
    model = Keeps()
    model.gone = "still here"
    model.layer.weight.grad = torch.ones(8, 8)
    before, bits = everything(model), {key: value.clone() for key, value in model.state_dict().items()}
    rows = torch.randn(4, 8)
    streams = RandomState.now()
    estimate_memory(model, rows, step=total, optimizer=torch.optim.Adam, precision="bf16-mixed")
    assert everything(model) == before
    assert len(Keeps.of_all) == 1
    assert type(Keeps.of_all[0]) is torch.Tensor
    assert Keeps.latest == {}
    assert model.gone == "still here"
    assert model.helper.count == 0
    assert model.by_name["deep"] == [{"er": 1}]
    assert model.names == {"a"}
    assert all(torch.equal(value, bits[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.layer.weight.grad, torch.ones(8, 8))
    assert model.training
    assert RandomState.now() == streams
    # and it trains
    model(torch.randn(4, 8)).sum().backward()


def test_tensors_are_fake_wherever_they_are_held():
    def held(model):
        yield from (model.constant, model.by_name["last"], model.queue[0], model.pair[0], model.helper.total)
        yield from (model.nested["a"][0][0], model.nested["b"][0], model.layer.weight, model.of_all[0])

    model = Keeps()
    before = list(held(model))
    with fake_mode(), borrowed(model, TensorExchange()):
        within = list(held(model))
    assert all(isinstance(one, FakeTensor) for one in within)
    assert [one.shape for one in within] == [one.shape for one in before]
    assert all(one is other for one, other in zip(held(model), before, strict=True))


def test_an_optimizer_with_state_is_left_as_it_was_and_its_state_counts():
    model = mlp(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps `step` on the instance
    weight = model[0].weight.detach().clone()
    state = {key: value.clone() for key, value in optimizer.state[model[0].weight].items()}
    made = estimate_memory(model, torch.zeros(1, 64), step=total, optimizer=optimizer, steps=1)
    assert made.composition["optimizer"] == 2 * (64 * 64 * 4 + 512) + 2 * 512
    after = optimizer.state[model[0].weight]
    assert scheduler.optimizer is optimizer
    assert torch.equal(model[0].weight, weight)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert all(torch.equal(after[key], value) for key, value in state.items())


def test_parameters_of_a_model_on_meta_are_never_made_real():
    with torch.device("meta"):
        model = mlp(*[32768] * 18)  # 68 GiB
    made = estimate_memory(model, torch.zeros(1, 32768, device="meta"), step=total, optimizer=torch.optim.SGD)
    assert made.parameter_count == 17 * (32768**2 + 32768)
    assert made.peak_allocated > 2 * 4 * made.parameter_count
    assert all(parameter.is_meta for parameter in model.parameters())


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
