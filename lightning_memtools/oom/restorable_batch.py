"""A batch as a step began with it: its containers are restored, and tensors that the step wrote are found."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_memtools._torch import WRITE_COUNT, write_count_or_none
from lightning_memtools.memory.nested_tensors import is_plain_object, named_tensors

_DEEPEST = 6  # levels of containers
_PLAIN = {str, int, float, bool, bytes, type(None)}


class RestorableBatch:
    """Restores what a failed attempt has changed in a batch: items of dictionaries and lists, attributes of objects.

    Tensors are not copied. One that was written in place is named.

    Args:
        batch: The batch. This is done before every step, so that it takes as little time as can be.
    """

    __slots__ = ("_batch", "_copies", "_counts", "_tensors")

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._copies: list[tuple[Any, Any]] = []
        self._tensors: list[Tensor] = []
        _note(batch, self._copies, self._tensors, ())
        self._counts = write_counts(self._tensors)

    def restore(self) -> str:
        """Restore the containers, and return the reason why the batch cannot be used again, else ""."""
        for held, copied in self._copies:
            if type(held) is list:
                held[:] = copied
            else:
                held.clear()
                held.update(copied)
        now = write_counts(self._tensors)
        if now == self._counts:
            return ""
        written = {id(tensor) for tensor, a, b in zip(self._tensors, self._counts, now, strict=True) if a != b}
        names = [name for name, tensor in named_tensors(self._batch, "batch") if id(tensor) in written]
        return (
            f"the step wrote {names[0] if names else 'a tensor of the batch'} in place, so that it would be written "
            "twice; let the step make a new tensor"
        )


def write_counts(tensors: list[Tensor]) -> list[int]:
    """Return how often each tensor was written; -1 for those that do not count it."""
    try:
        return list(map(WRITE_COUNT, tensors))  # without a loop in Python: it is asked in every step
    except RuntimeError:  # an inference tensor is among them
        return list(map(write_count_or_none, tensors))


def _note(thing: Any, copies: list[tuple[Any, Any]], tensors: list[Tensor], within: tuple[int, ...]) -> None:
    kind = type(thing)
    if kind is Tensor:
        tensors.append(thing)
        return
    items: Any
    if kind is list:
        copies.append((thing, thing[:]))
        items = thing
    elif kind is tuple:
        items = thing
    elif kind is dict:
        copies.append((thing, thing.copy()))
        items = thing.values()
    else:
        items = _other_items(thing, copies, tensors)
    for item in items:
        if type(item) is Tensor:
            tensors.append(item)
        elif type(item) not in _PLAIN and id(item) not in within and len(within) < _DEEPEST:
            _note(item, copies, tensors, (*within, id(item)))


def _other_items(thing: Any, copies: list[tuple[Any, Any]], tensors: list[Tensor]) -> Any:
    if isinstance(thing, Tensor):
        tensors.append(thing)
        return ()
    items: list[Any] = []
    if isinstance(thing, tuple):
        items += thing
    elif isinstance(thing, dict):
        copies.append((thing, dict(thing)))
        items += thing.values()
    # An iterator of batches is none, and leads to datasets and loops.
    if (
        type(thing) not in _PLAIN
        and is_plain_object(thing)
        and hasattr(thing, "__dict__")
        and not hasattr(thing, "__next__")
    ):
        copies.append((vars(thing), vars(thing).copy()))
        items += vars(thing).values()
    return items
