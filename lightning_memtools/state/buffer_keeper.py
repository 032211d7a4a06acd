"""Copies a module's buffers at the start of a step, to restore them if the step is taken back."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_memtools._torch import buffers_of, copy_each, write_count

# Larger buffers are mostly constants (masks, position tables). They are copied at first too, and the copy is released
# after one step that did not write them, so that it costs no memory at the peak. No normalisation layer's statistics
# are as large, which matters because a native batch norm does not count its writes.
LARGE_BYTES = 2**20

_KIND = attrgetter("shape", "dtype", "device")


@dataclass(slots=True, eq=False)
class _BufferPlace:
    """The place of a buffer: the module's dict and the key. Stores the tensor and version that were last there."""

    held: dict[str, Tensor | None]
    key: str
    name: str
    tensor: Tensor | None = None
    version: int = 0

    def look(self) -> Tensor:
        tensor = self.tensor = self.held[self.key]
        assert tensor is not None, "places of None are kept apart"
        self.version = write_count(tensor)
        return tensor

    def is_written(self) -> bool:
        tensor = self.held.get(self.key)
        return tensor is not self.tensor or (tensor is not None and write_count(tensor) != self.version)


class _BufferCopies:
    """Copies of all buffers of one device and dtype, as a single flat tensor, so that one kernel copies them all."""

    def __init__(self, places: list[_BufferPlace]) -> None:
        self.places = places
        self.tensors: list[Any] = [place.look() for place in places]
        self.flat = torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors])
        self._sizes, self._kinds = list(map(Tensor.numel, self.tensors)), list(map(_KIND, self.tensors))
        parts = zip(torch.split(self.flat, self._sizes), self.tensors, strict=True)
        self._values = [part.view(tensor.shape) for part, tensor in parts]

    def take(self, unless: Tensor | None) -> bool:
        """Copy the buffers again if `unless` is None or zero. Return False if a device, dtype or shape has changed."""
        now: list[Any] = [place.held.get(place.key) for place in self.places]
        if any(map(is_not, now, self.tensors)):
            if any(tensor is None or _KIND(tensor) != kind for tensor, kind in zip(now, self._kinds, strict=True)):
                return False
            self.tensors = now
        elif list(map(Tensor.numel, now)) != self._sizes:  # resized in its place
            return False
        if unless is None:
            copy_each(self._values, now)
        else:
            is_set = unless.to(self.flat.device, non_blocking=True) != 0
            torch.where(is_set, self.flat, torch.cat([tensor.reshape(-1) for tensor in now]), out=self.flat)
        return True

    def restore(self) -> None:
        pairs = [pair for pair in zip(self.tensors, self._values, strict=True) if not is_expanded(pair[0])]
        if pairs:
            # Through `.data`, which does not count as a write: a graph may need these buffers for a second backward.
            copy_each([tensor.data for tensor, _ in pairs], [value for _, value in pairs])
        for place, tensor in zip(self.places, self.tensors, strict=True):
            place.held[place.key] = tensor  # the step may have put a new tensor there


class BufferKeeper:
    """Copies a module's buffers at the start of a step, to restore them if the step is undone.

    The copies take as much memory as the buffers. The copy of a large buffer is released if the next step does not
    write to the buffer. The host never waits for the device.

    Args:
        module: The module whose buffers are copied.
    """

    def __init__(self, module: Module) -> None:
        self._names, parts = zip(*module.named_modules(), strict=True)
        self._held = list(map(buffers_of, parts))
        self._keys: list[set[str]] = []  # those of each module when all was copied
        self._n_keys = -1
        self._copies: list[_BufferCopies] = []
        self._large: list[_BufferCopies] = []  # those of one large buffer that may be a constant
        self._released: list[_BufferPlace] = []
        self._none: list[_BufferPlace] = []

    @torch.no_grad()
    def keep(self, unless: Tensor | None = None) -> None:
        """Copy the buffers. But if the 0-dim device tensor `unless` is nonzero, keep the earlier copies instead."""
        if self._large:
            constant = [copies for copies in self._large if not copies.places[0].is_written()]
            self._released += [copies.places[0] for copies in constant]
            self._copies = [copies for copies in self._copies if copies not in constant]
            self._large = []
        written = [place for place in self._released if place.is_written()]
        if self._has_other_buffers() or not all(copies.take(unless) for copies in self._copies):
            self._copy_all()
        elif written:
            self._released = [place for place in self._released if place not in written]
            self._copies += [_BufferCopies([place]) for place in written]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers back to the values that were copied."""
        for copies in self._copies:
            copies.restore()
        for place in self._none:
            place.held[place.key] = None
        for held, keys in zip(self._held, self._keys, strict=False):
            for key in held.keys() - keys:  # of the buffers that a module has registered since, none stays
                del held[key]

    def unrestored(self) -> list[str]:
        """Return the names of buffers that cannot be restored: they were written since `keep`, but had no copy."""
        return [place.name for place in self._released if place.is_written()]

    def _has_other_buffers(self) -> bool:
        """Return True if, after the last copy of all buffers, any was added or removed, or is no longer None."""
        is_set = (place.held.get(place.key) is not None for place in self._none)
        return sum(map(len, self._held)) != self._n_keys or any(is_set)

    def _copy_all(self) -> None:
        self._keys, self._n_keys = list(map(set, self._held)), sum(map(len, self._held))
        self._none = []
        groups: dict[object, list[_BufferPlace]] = defaultdict(list)
        for name, held in zip(self._names, self._held, strict=True):
            for key, buffer in held.items():
                place = _BufferPlace(held, key, f"{name}.{key}" if name else key)
                if buffer is None:
                    self._none.append(place)
                # Distributed, quantized and not yet initialised buffers are subclasses that cannot be side by side.
                elif type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta:
                    alone = id(place) if buffer.nbytes > LARGE_BYTES else None
                    groups[buffer.device, buffer.dtype, alone].append(place)
        self._copies, self._released = list(map(_BufferCopies, groups.values())), []
        self._large = [
            copies for copies in self._copies if copies.flat.nbytes > LARGE_BYTES and len(copies.places) == 1
        ]


def is_expanded(tensor: Tensor) -> bool:
    """Return True if elements of a tensor share memory, as after expand(). It cannot be written in place."""
    return any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
