"""The advice on what is held fits the kind of its holder, and frees the memory when it is followed."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_memtools import MemoryMonitor, VirtualDevice
from lightning_memtools.memory.leaks.freeing import how_to_free
from lightning_memtools.memory.leaks.holder_search import Holding, names_of_run
from lightning_memtools.memory.leaks.holdings import find_holdings

MIB = 2**20


def mib(_: Any = None) -> Tensor:
    return torch.zeros(MIB // 4)


class Model(nn.Module):
    """The model in training. What the user's code has besides is in `others`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)


Names = dict[str, Any]
"""What the advice refers to by name, beside modules and the model."""


def found(device: VirtualDevice, model: nn.Module, *others: Any) -> list[Holding]:
    return [*find_holdings(device.holds, model, [], None, names_of_run(model, others)).found]


def follow(advice: str, names: Names) -> None:
    """Do what the advice says: run its first code, or clear the container that it names."""
    words = advice.partition(", or ")[0]
    if code := re.search(r"`(.*?)`", words):
        exec(code[1].replace("close()", "stream.close()"), names)  # noqa: S102, our own text
        return
    path = re.search(r"Clear (\S+) when|yielded \((\S+)\)", words)
    assert path is not None
    eval(path[1] or path[2], names).clear()  # noqa: S307


def fresh(**attributes: Any) -> None:
    """Put these into a module that is younger than the frozen objects of `quick_collections`."""
    module = ModuleType("fresh")
    vars(module).update(attributes)
    sys.modules["fresh"] = module
    for value in attributes.values():
        if isinstance(value, type):
            value.__module__ = "fresh"


def a_class(name: str, **attributes: Any) -> Any:
    return type(name, (), attributes)


def cached(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function whose cache holds a result."""
    function(*arguments)
    return function


class Looks:
    """A hook that keeps a tensor at each call."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, *_: Any) -> None:
        self.seen.append(mib())


def looker() -> Callable[..., None]:
    seen: list[Tensor] = []
    return lambda *_: seen.append(mib())


def hooked(register: Callable[[Model], Any]) -> Callable[[Model], Names]:
    def keep(model: Model) -> Names:
        handle = register(model)
        model.net(torch.ones(1, 4, requires_grad=True)).sum().backward()
        return {"handle": handle}

    return keep


def attacked() -> Tensor:
    x = torch.zeros(MIB // 4, requires_grad=True)
    x.square().sum().backward()
    return x


class KeepsItems(Dataset[Tensor]):
    """Keeps what it has yielded."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        self.kept.append(mib())
        return self.kept[-1][:1]


class Doubled(Dataset[Tensor]):
    """Around another one."""

    def __init__(self, inner: KeepsItems) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Tensor:
        return 2 * self.inner[index]


def dataset(_: Model) -> Names:
    data = Doubled(KeepsItems())
    assert len([data[n] for n in range(2)]) == 2
    return {"KeepsItems": data.inner, "data": data}


def running_mean() -> Any:
    kept: list[Tensor] = []
    while True:
        kept.append((yield len(kept)))


def generator(model: Model) -> Names:
    stream: Any = running_mean()
    for value in (None, mib(), mib()):
        stream.send(value)
    model.stream = stream
    return {"stream": stream}


def in_model(name: str, make: Callable[[], Any]) -> Callable[[Model], None]:
    return lambda model: setattr(model, name, make())


def in_class(**make: Callable[[], Any]) -> Callable[[Model], None]:
    return lambda _: fresh(Registry=a_class("Registry", **{name: one() for name, one in make.items()}))


CASES = [
    ("`fresh.table.cache_clear()`", lambda _: fresh(table=cached(functools.cache(mib), 3))),
    ("`fresh.Registry.of.cache_clear()`", in_class(of=lambda: cached(functools.cache(lambda _, n: mib(n)), 0, 3))),
    ("`Model.lookup.cache_clear()`", in_model("lookup", lambda: cached(functools.cache(mib), 3))),
    ("handle.remove()", hooked(lambda model: model.net.register_forward_hook(looker()))),
    ("handle.remove()", hooked(lambda model: model.net.register_forward_pre_hook(Looks()))),
    ("handle.remove()", hooked(lambda model: model.net.weight.register_hook(looker()))),
    ("Clear fresh.Registry.outputs", in_class(outputs=lambda: [mib()])),
    ("Clear fresh.Registry.by_name", in_class(by_name=lambda: {"net": [mib()]})),
    ("`del fresh.Registry.table`", in_class(table=mib)),
    ("Clear fresh.Registry.bag", in_class(bag=lambda: {mib()})),
    ("`Model.probe.grad = None`", in_model("probe", attacked)),
    ("`Model.images['dream'].grad = None`", in_model("images", lambda: {"dream": attacked()})),
    ("`fresh.inputs[0].grad = None`", lambda _: fresh(inputs=[attacked()])),
    ("`fresh.Registry.prompt.grad = None`", in_class(prompt=attacked)),
    ("(KeepsItems.kept)", dataset),
    ("Close the generator running_mean with `close()`", generator),
]


pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.mark.parametrize(("words", "keep"), CASES)
def test_the_advice_fits_the_holder_and_frees_what_it_holds(words, keep):
    with VirtualDevice() as device:
        model = Model()
        names = {"Model": model, **(keep(model) or {})}
        names["fresh"] = sys.modules.get("fresh")
        n_bytes = 0
        for _ in range(3):  # a tensor may have more than one holder, and a gradient comes beside its own tensor
            held = found(device, model)
            mine = [advice for advice in map(how_to_free, held) if words in advice]
            if not mine:
                break
            n_bytes += held[0].n_bytes
            follow(mine[0], names)
        else:
            pytest.fail("it is still held")
        assert n_bytes >= MIB


@pytest.mark.parametrize("also_the_user", [True, False])
def test_the_users_own_objects_are_named_before_ours(also_the_user):
    with VirtualDevice() as device:
        model, monitor = Model(), MemoryMonitor()
        monitor.kept = [mib()]
        if also_the_user:
            model.deep = {"a": [{"b": monitor.kept[0]}]}
        (holding,) = found(device, model, monitor)
        assert holding.path == ("Model.deep" if also_the_user else "MemoryMonitor.kept")
        model.other = mib()[: MIB // 8]
        monitor.kept.append(torch.zeros(MIB))
        assert found(device, model, monitor)[0].path.startswith("Model.")
