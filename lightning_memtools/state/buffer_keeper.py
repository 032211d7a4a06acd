"""Copies a module's buffers at the start of a step, to restore them if the step is taken back."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Module

from lightning_memtools._torch import buffers_of, copy_each, write_count

# Larger buffers are mostly constants (masks, position tables). They are copied at first too, and the copy is released
# after one step that did not write them, so that it costs no memory at the peak. No normalisation layer's statistics
# are as large, which matters because a native batch norm does not count its writes.
LARGE_BYTES = 2**20


_KIND = attrgetter("shape", "dtype", "device")


@dataclass(slots=True)
class _BufferSlot:
    """The place of a buffer in its module, and the tensor that was there when it was last copied."""

    held: dict[str, Tensor | None]
    key: str
    name: str
    tensor: Tensor | None
    version: int = 0
    was_written: bool = False  # since copies are made

    def see(self, *, is_first: bool = False) -> Tensor:
        tensor = self.held[self.key]
        assert tensor is not None, "slots of None are kept apart"
        self.was_written = self.was_written or (not is_first and self.is_written())
        self.tensor, self.version = tensor, write_count(tensor)
        return tensor

    def is_written(self) -> bool:
        now = self.held.get(self.key)
        return now is not self.tensor or (now is not None and write_count(now) != self.version)


class _BufferCopies:
    """Copies of buffers of one device and dtype, side by side in one tensor: one kernel copies all of them."""

    def __init__(self, slots: list[_BufferSlot]) -> None:
        self.slots = slots
        tensors = [slot.see(is_first=True).detach() for slot in slots]
        self._flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        parts = torch.split(self._flat, [tensor.numel() for tensor in tensors])
        self._values = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        self._kinds = list(map(_KIND, tensors))

    @property
    def is_large(self) -> bool:
        return self._flat.nbytes > LARGE_BYTES and len(self.slots) == 1

    def take(self, unless: Tensor | None) -> bool:
        """Copy the buffers again; return False if they no longer have the kind and shape of the copies."""
        tensors = [slot.held.get(slot.key) for slot in self.slots]
        present = [tensor for tensor in tensors if tensor is not None]
        if list(map(_KIND, present)) != self._kinds:
            return False
        if len(self.slots) == 1:  # of others nobody asks whether they were written
            self.slots[0].see()
        for slot, tensor in zip(self.slots, tensors, strict=True):
            slot.tensor = tensor
        if unless is None:
            copy_each(self._values, present)
        else:
            is_set = unless.to(self._flat.device, non_blocking=True) != 0
            torch.where(is_set, self._flat, torch.cat([each.reshape(-1) for each in present]), out=self._flat)
        return True

    def restore(self) -> None:
        pairs = [
            (slot.tensor, value)
            for slot, value in zip(self.slots, self._values, strict=True)
            if slot.tensor is not None and not is_expanded(slot.tensor)
        ]
        if pairs:
            # Through `.data`, which does not count as a write: a graph may need these buffers for a second backward.
            copy_each([tensor.data for tensor, _ in pairs], [value for _, value in pairs])
        for slot in self.slots:
            slot.held[slot.key] = slot.tensor  # the step may have put a new tensor there


class BufferKeeper:
    """Copies of a module's buffers from the start of a step, to restore them.

    The copies take as much memory as the buffers; large ones that no step writes are not kept. Nothing waits for the
    device.

    Args:
        module: The module that is trained.
    """

    def __init__(self, module: Module) -> None:
        self._held = [(name, buffers_of(part)) for name, part in module.named_modules()]
        self._copies: list[_BufferCopies] | None = None
        self._released: list[_BufferSlot] = []
        self._none: list[_BufferSlot] = []
        self._n_entries = -1

    @torch.no_grad()
    def keep(self, unless: Tensor | None = None) -> None:
        """Copy the buffers now. `unless`: keep the earlier copies if this 0-dim tensor on the device is not 0."""
        if self._copies is None or self._has_other_buffers():
            self._copy_all()
            return
        kept = []
        for copies in self._copies:
            if copies.is_large and not copies.slots[0].was_written and not copies.slots[0].is_written():
                self._released.append(copies.slots[0])
            elif copies.take(unless):
                kept.append(copies)
            else:
                self._copy_all()
                return
        written = [slot for slot in self._released if slot.is_written()]
        self._released = [slot for slot in self._released if slot not in written]
        for slot in written:
            slot.was_written = True
        self._copies = [*kept, *(_BufferCopies([slot]) for slot in written)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers."""
        if self._copies is None:
            return
        for copies in self._copies:
            copies.restore()
        known = {id(held): set[str]() for _, held in self._held}
        for slot in (*self._none, *self._released, *(slot for copies in self._copies for slot in copies.slots)):
            known[id(slot.held)].add(slot.key)
        for slot in self._none:
            slot.held[slot.key] = None
        for _, held in self._held:  # of the buffers that a module has registered since, none stays
            for key in [key for key, buffer in held.items() if key not in known[id(held)] and _is_copied(buffer)]:
                del held[key]

    def unrestored(self) -> list[str]:
        """Return the names of large buffers that were first written since `keep`: they cannot be restored."""
        return [slot.name for slot in self._released if slot.is_written()]

    def _has_other_buffers(self) -> bool:
        """Return whether a module has registered a buffer since, or set one that was None."""
        return sum(len(held) for _, held in self._held) != self._n_entries or any(
            slot.held.get(slot.key) is not None for slot in self._none
        )

    def _copy_all(self) -> None:
        self._n_entries = sum(len(held) for _, held in self._held)
        slots = [
            _BufferSlot(held, key, f"{name}.{key}" if name else key, buffer)
            for name, held in self._held
            for key, buffer in held.items()
            if buffer is None or _is_copied(buffer)
        ]
        self._none = [slot for slot in slots if slot.tensor is None]
        groups: dict[object, list[_BufferSlot]] = defaultdict(list)
        for slot in slots:
            if slot.tensor is not None:
                alone = id(slot) if slot.tensor.nbytes > LARGE_BYTES else None
                groups[slot.tensor.device, slot.tensor.dtype, alone].append(slot)
        self._copies, self._released = list(map(_BufferCopies, groups.values())), []


def _is_copied(buffer: Tensor | None) -> bool:
    # Distributed, quantized and not yet initialised buffers are subclasses that cannot be laid side by side.
    return type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share memory, as after expand(): such a tensor cannot be written."""
    return any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
