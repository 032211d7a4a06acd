from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_memtools.memory.leaks.holders import find_holder, names_of_modules

IN_A_GLOBAL: list[Tensor] = []


class Recorder:
    def __init__(self) -> None:
        self.kept: deque[Tensor] = deque()


class Slotted:
    __slots__ = ("kept",)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.outputs: list[Tensor] = []


def new() -> Tensor:
    return torch.zeros(3)


def having(thing, **attributes):
    for name, value in attributes.items():
        setattr(thing, name, value)
    return thing


@pytest.mark.parametrize(
    ("keep", "path", "container"),
    [
        (lambda m, t: m.outputs.extend([new(), t, new()]), "Model.outputs[1]", "Model.outputs"),
        (
            lambda m, t: having(m.head, steps=[{"pred": new(), "rest": (new(), t)}]),
            *("Model.head.steps[0]['rest'][1]", "Model.head.steps"),
        ),
        (
            lambda m, t: having(m, others=[having(nn.Linear(2, 2), seen={"x": t})]),  # not registered
            *("Model.others[0].seen['x']", "Model.others"),
        ),
        (
            lambda m, t: having(m, slotted=having(Slotted(), kept={"y": t})),
            *("Model.slotted.kept['y']", "Model.slotted.kept"),
        ),
        (lambda m, t: having(m, state=SimpleNamespace(x=t)), "Model.state.x", "Model.state.x"),
        (lambda m, t: having(m, by_step=OrderedDict({(0, "a"): t})), "Model.by_step[(0, 'a')]", "Model.by_step"),
        (lambda m, t: having(m, bag={t}), "Model.bag", "Model.bag"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("quick_collections")
def test_attributes_of_a_known_module(keep, path, container):
    model, tensor = Model(), new()
    keep(model, tensor)
    holder = find_holder(tensor, names_of_modules(model))
    assert (holder.path, holder.container_path, holder.place) == (path, container, "")
    assert any(held is tensor for held in holder.holds())


def test_a_global_and_a_default_argument():
    IN_A_GLOBAL.append(new())
    holder = find_holder(IN_A_GLOBAL[0], {})
    assert holder.path == f"{__name__}.IN_A_GLOBAL[0]"
    assert next(holder.holds()) is IN_A_GLOBAL[0]
    IN_A_GLOBAL.clear()

    def step(x, seen=[]):  # noqa: B006, the mistake that is looked for
        seen.append(x)

    step(new())
    (seen,) = step.__defaults__
    holder = find_holder(seen[0], {})
    assert holder.path.startswith("the default value of ")
    assert list(holder.holds()) == seen


@pytest.mark.usefixtures("quick_collections")
def test_if_no_holder_has_a_name_the_outermost_object_is_reported():
    def hidden():
        recorder = Recorder()
        recorder.kept.append(new())
        return recorder.kept[0], iter([recorder])

    tensor, keeps_it_alive = hidden()
    holder = find_holder(tensor, {})
    assert holder.path == "Recorder.kept[0]"
    del keeps_it_alive


@pytest.mark.usefixtures("quick_collections")
def test_local_variables_do_not_count():
    tensor = new()
    assert find_holder(tensor, {}) is None


@pytest.mark.usefixtures("quick_collections")
def test_the_callers_own_containers_are_ignored():
    model = Model()
    model.last = new()
    found = [model.last]
    assert find_holder(new(), {}, ignore=(found,)) is None
    holder = find_holder(found[0], names_of_modules(model), ignore=(found,))
    assert holder.path == "Model.last"
