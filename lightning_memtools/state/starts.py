"""Records what a batch and an update begin with, to restore it: containers, settings, new state, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._torch import WRITE_COUNT, has_readable_values, write_count_or_none
from lightning_memtools.memory.nested_tensors import is_plain_object, named_tensors


def versions_of(batch: Any) -> tuple[int, ...]:
    """Return how often each tensor of a batch was written in place; -1 where it is not counted."""
    parts = (batch,) if type(batch) is Tensor else batch
    if type(parts) in {tuple, list} and set(map(type, parts)) == {Tensor}:
        return _write_counts(parts)
    return _write_counts([tensor for _, tensor in named_tensors(batch, "batch")])


def changed_in_place(batch: Any, versions: tuple[int, ...]) -> Iterator[str]:
    """Yield the names of the batch's tensors that were written since their versions were recorded."""
    names = [name for name, _ in named_tensors(batch, "batch")]
    if len(names) != len(versions):
        yield "batch (tensors were added or removed)"
        return
    for name, now, before in zip(names, versions_of(batch), versions, strict=True):
        if now != before:
            yield name


def _write_counts(tensors: Any) -> tuple[int, ...]:
    try:
        return tuple(map(WRITE_COUNT, tensors))  # without a loop in Python: it is asked in every step
    except (RuntimeError, ValueError):  # an inference tensor or an uninitialized parameter is among them
        return tuple(map(write_count_or_none, tensors))


_DEEPEST = 6  # levels of containers in a batch
_PLAIN = {str, int, float, bool, bytes, type(None)}
_BUILT_IN = _PLAIN | {list, tuple, dict}


class RestorableBatch:
    """Restores what a failed attempt has changed in a batch: items of dictionaries and lists, attributes of objects.

    Tensors are not copied. One that was written in place is named.

    Args:
        batch: The batch. It is walked before every step, so this must be quick.
    """

    __slots__ = ("_batch", "_copies", "_counts", "_tensors")

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._copies: list[tuple[Any, Any]] = []
        self._tensors: list[Tensor] = []
        self._note(batch, ())
        self._counts = _write_counts(self._tensors)

    def restore(self) -> str:
        """Restore the containers, and return the reason why the batch cannot be used again, else ""."""
        for held, copied in self._copies:
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(copied)
        now = _write_counts(self._tensors)
        if now == self._counts:
            return ""
        written = {id(tensor) for tensor, a, b in zip(self._tensors, self._counts, now, strict=True) if a != b}
        names = [name for name, tensor in named_tensors(self._batch, "batch") if id(tensor) in written]
        return (
            f"the step wrote {names[0] if names else 'a tensor of the batch'} in place, so that it would be written "
            "twice; let the step make a new tensor"
        )

    def _note(self, thing: Any, within: tuple[int, ...]) -> None:
        if isinstance(thing, Tensor):
            self._tensors.append(thing)
            return
        items: list[Any] = []
        if isinstance(thing, (list, tuple)):
            items += thing
        elif isinstance(thing, dict):
            items += thing.values()
        if isinstance(thing, (list, dict)):
            self._copies.append((thing, list(thing) if isinstance(thing, list) else dict(thing)))
        # An iterator of batches is part of none, and leads to datasets and loops.
        is_object = type(thing) not in _BUILT_IN and hasattr(thing, "__dict__") and not hasattr(thing, "__next__")
        if is_object and is_plain_object(thing):
            self._copies.append((vars(thing), vars(thing).copy()))
            items += vars(thing).values()
        for item in items:
            if type(item) not in _PLAIN and id(item) not in within and len(within) < _DEEPEST:
                self._note(item, (*within, id(item)))


class UpdateStart:
    """The state of an optimizer before an update.

    The keys of its state are always recorded: Adam creates zeros in its first step, but fused SGD leaves its momentum
    buffers uninitialised, and a step after one that was held back would use them.

    Args:
        optimizer: The optimizer.
        before: An earlier start of the same optimizer, if no key was added since: listing them takes time.
        copy: Copies a tensor that the update will write; None to copy none, so that `undo` must not be called.

    Attributes:
        keys: The keys of each parameter's state.
        n_entries: The number of states and keys, which is compared instead of all keys.
    """

    def __init__(
        self, optimizer: Optimizer, before: UpdateStart | None = None, *, copy: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._optimizer = optimizer
        self.n_entries: int
        self.keys: dict[Tensor, frozenset[str]]
        if before is not None:
            self.n_entries, self.keys = before.n_entries, before.keys
        else:
            self.n_entries = _count(optimizer)
            self.keys = {parameter: frozenset(state) for parameter, state in optimizer.state.items()}
        # Learning rates may be tensors.
        self._settings = [
            {key: each.clone() if isinstance(each, Tensor) else each for key, each in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        if copy is None:
            return
        with torch.no_grad():
            self._copies = [(each, copy(each.detach())) for each in tensors_written_by(optimizer)]
        self._numbers = [
            (state, {key: value for key, value in state.items() if isinstance(value, (int, float))})
            for state in optimizer.state.values()
        ]

    def has_other_keys(self) -> bool:
        """Return whether an entry of the state was created or removed since."""
        return _count(self._optimizer) != self.n_entries

    def remove_new_state(self) -> None:
        """Remove the entries of the state that were created since."""
        if not self.has_other_keys():
            return
        for parameter in list(self._optimizer.state):
            known = self.keys.get(parameter)
            if known is None:
                del self._optimizer.state[parameter]
                continue
            state = self._optimizer.state[parameter]
            for key in [key for key in state if key not in known]:
                del state[key]

    @torch.no_grad()
    def restore_settings(self) -> None:
        """Undo what schedulers did to learning rates and other settings."""
        for group, saved in zip(self._optimizer.param_groups, self._settings, strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key].copy_(value)  # schedulers write into a learning rate that is a tensor
                else:
                    group[key] = value

    @torch.no_grad()
    def undo(self) -> None:
        """Undo the update bit for bit, by the copies."""
        self.remove_new_state()
        for tensor, copied in self._copies:
            tensor.data.copy_(copied)
        for state, numbers in self._numbers:
            state.update(numbers)


def tensors_written_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that an update may write: parameters with a gradient, and the optimizer's state."""
    found = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for state in optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, Tensor)] if isinstance(state, Mapping) else []
    return [tensor for tensor in found if has_readable_values(tensor)]


def _count(optimizer: Optimizer) -> int:
    return sum(map(len, optimizer.state.values())) + len(optimizer.state)
