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
from torch.utils.data import Dataset, IterableDataset

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


# --- caches of functools


def cached(_: Model) -> None:
    fresh(table=functools.cache(mib))
    sys.modules["fresh"].table(3)


def cached_in_a_dict(_: Model) -> None:
    fresh(tables=functools.lru_cache(maxsize=None)(lambda n: {"sin": mib(n), "cos": mib(n)}))
    sys.modules["fresh"].tables(3)


def cached_method(_: Model) -> None:
    fresh(Positions=a_class("Positions", of_length=functools.cache(lambda _self, n: mib(n))))
    sys.modules["fresh"].Positions().of_length(3)


def cached_by_the_model(model: Model) -> None:
    model.lookup = functools.cache(mib)
    model.lookup(3)


# --- hooks


def recorder(seen: list[Tensor]) -> Callable[..., None]:
    def look(*_: Any) -> None:
        seen.append(mib())

    return look


class Looks:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, *_: Any) -> None:
        self.seen.append(mib())


def forward_hook(model: Model) -> Names:
    handle = model.net.register_forward_hook(recorder([]))
    model.net(torch.ones(1, 4))
    return {"handle": handle}


def pre_hook_that_is_an_object(model: Model) -> Names:
    handle = model.net.register_forward_pre_hook(Looks())
    model.net(torch.ones(1, 4))
    return {"handle": handle}


def backward_hook(model: Model) -> Names:
    handle = model.net.register_full_backward_hook(recorder([]))
    model.net(torch.ones(1, 4, requires_grad=True)).sum().backward()
    return {"handle": handle}


def tensor_hook(model: Model) -> Names:
    handle = model.net.weight.register_hook(recorder([]))
    model.net(torch.ones(1, 4)).sum().backward()
    return {"handle": handle}


# --- attributes of classes


def list_of_a_class(_: Model) -> None:
    fresh(Registry=a_class("Registry", outputs=[mib()]))


def dict_of_a_class(_: Model) -> None:
    fresh(Registry=a_class("Registry", by_name={"net": [mib()]}))


def tensor_of_a_class(_: Model) -> None:
    fresh(Registry=a_class("Registry", table=mib()))


def set_of_a_base_class(_: Model) -> None:
    base = a_class("Base", kept={mib()})
    fresh(Base=base, Derived=type("Derived", (base,), {}))


# --- gradients of what is no parameter


def attacked() -> Tensor:
    x = torch.zeros(MIB // 4, requires_grad=True)
    x.square().sum().backward()
    return x


def gradient_of_an_attribute(model: Model) -> None:
    model.probe = attacked()


def gradient_in_a_dict(model: Model) -> None:
    model.images = {"dream": attacked()}


def gradient_in_a_global_list(_: Model) -> None:
    fresh(inputs=[attacked()])


def gradient_of_a_class_attribute(_: Model) -> None:
    fresh(Registry=a_class("Registry", prompt=attacked()))


# --- data sets that keep what they have yielded


class KeepsItems(Dataset[Tensor]):
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        self.kept.append(mib())
        return self.kept[-1][:1]


class KeepsByIndex(KeepsItems):
    def __init__(self) -> None:
        self.cache: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        return self.cache.setdefault(index, mib())[:1]


class KeepsStream(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.history: list[tuple[Tensor, int]] = []

    def __iter__(self) -> Any:
        for n in range(2):
            self.history.append((mib(), n))
            yield torch.ones(1)


class Doubled(Dataset[Tensor]):
    """Around another one."""

    def __init__(self, inner: KeepsItems) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Tensor:
        return 2 * self.inner[index]


def dataset(make: Callable[[], Any], owner: Callable[[Any], Any] = lambda data: data) -> Callable[[Model], Names]:
    def keep(_: Model) -> Names:
        data = make()
        items = [data[n] for n in range(2)] if isinstance(data, KeepsItems | Doubled) else [*data]
        assert len(items) == 2
        return {type(owner(data)).__name__: owner(data), "data": data}

    return keep


def running_mean() -> Any:
    kept: list[Tensor] = []
    while True:
        kept.append((yield len(kept)))


def generator(model: Model) -> Names:
    model.stream = running_mean()
    next(model.stream)
    model.stream.send(mib())
    model.stream.send(mib())
    return {"stream": model.stream}


CASES = [
    *((case, "cache_clear()") for case in (cached, cached_in_a_dict, cached_method, cached_by_the_model)),
    *((case, "handle.remove()") for case in (forward_hook, pre_hook_that_is_an_object, backward_hook, tensor_hook)),
    (list_of_a_class, "Clear fresh.Registry.outputs"),
    (dict_of_a_class, "Clear fresh.Registry.by_name"),
    (tensor_of_a_class, "`del fresh.Registry.table`"),
    (set_of_a_base_class, "Clear fresh.Base.kept"),
    (gradient_of_an_attribute, "`Model.probe.grad = None`"),
    (gradient_in_a_dict, "`Model.images['dream'].grad = None`"),
    (gradient_in_a_global_list, "`fresh.inputs[0].grad = None`"),
    (gradient_of_a_class_attribute, "`fresh.Registry.prompt.grad = None`"),
    (generator, "Close the generator running_mean with `close()`"),
    (dataset(KeepsItems), "(KeepsItems.kept)"),
    (dataset(KeepsByIndex), "(KeepsByIndex.cache)"),
    (dataset(KeepsStream), "(KeepsStream.history)"),
    (dataset(lambda: Doubled(KeepsItems()), lambda data: data.inner), "(KeepsItems.kept)"),
]


pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.mark.parametrize(("keep", "words"), CASES)
def test_the_advice_fits_the_holder_and_frees_what_it_holds(keep, words):
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
