"""What a batch began with, noted while training runs: random numbers, plain attributes, and its tensors' versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_memtools.nonfinite.batches import named_tensors
from lightning_memtools.state.state_snapshot import RandomState

SIMPLE = frozenset({bool, int, float, str, type(None)})
# A module's own business, which changes with every call or is put there by Lightning.
_NOT_PLAIN = {
    "training",
    "_is_full_backward_hook",
    "prepare_data_per_node",
    "allow_zero_length_dataloader_with_multiple_devices",
}

Attributes = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Start:
    """What a batch began with.

    Attributes:
        random: Where the streams of random numbers stood.
        attributes: Of each module that the user wrote, by its name: the attributes of simple types.
        versions: How often each tensor of the batch had been written, in the order of `named_tensors`.
    """

    random: RandomState
    attributes: Attributes
    versions: tuple[int, ...]


class StartKeeper:
    """Notes the start of each batch. Waits for no device; some 50 microseconds, and one for each module of the user's.

    Args:
        module: The module that is trained.
    """

    def __init__(self, module: Module) -> None:
        # torch's own modules keep no attribute that a step changes.
        self._written_by_users = [
            (name, vars(part), _n_of_every_module(vars(part)))
            for name, part in module.named_modules()
            if not type(part).__module__.startswith("torch.")
        ]

    def note(self, batch: Any) -> Start:
        """Note what the batch begins with now."""
        attributes = {name: simple_items(held, skip=n) for name, held, n in self._written_by_users}
        return Start(RandomState(), attributes, versions_of(batch))


def simple_items(held: dict[str, Any], skip: int = 0) -> dict[str, Any]:
    """The attributes of simple types (numbers, texts, None). `skip`: so many at the beginning are known not to be."""
    return {
        key: value for key, value in islice(held.items(), skip, None) if type(value) in SIMPLE and key not in _NOT_PLAIN
    }


def _n_of_every_module(held: dict[str, Any]) -> int:
    """How many attributes at the beginning are those that torch gives to every module: most of what there is."""
    names = list(vars(Module()))
    return len(names) if list(islice(held, len(names))) == names else 0


def put_attributes_back(module: Module, attributes: Attributes) -> None:
    """Set the attributes as they were noted; modules that are gone are passed over."""
    parts = dict(module.named_modules())
    for name, values in attributes.items():
        if name in parts:
            parts[name].__dict__.update(values)


def versions_of(batch: Any) -> tuple[int, ...]:
    """How often each tensor of a batch was written in place; inference tensors do not count."""
    return tuple(-1 if tensor.is_inference() else tensor._version for _, tensor in named_tensors(batch, "batch"))  # noqa: SLF001, the only way to see a write


def changed_in_place(batch: Any, versions: tuple[int, ...]) -> Iterator[str]:
    """The names of the batch's tensors that were written since their versions were noted."""
    named: list[tuple[str, Tensor]] = list(named_tensors(batch, "batch"))
    if len(named) != len(versions):
        yield "batch (tensors were added or removed)"
        return
    for (name, _), now, before in zip(named, versions_of(batch), versions, strict=True):
        if now != before:
            yield name
