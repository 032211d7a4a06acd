"""Copies at the start of a step what forward passes write: buffers, and parameters and attributes that were written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lightning_memtools._torch import WRITE_COUNT, buffers_of, copy_each, parameters_of, write_count

# Larger buffers are mostly constants (masks, position tables). They are copied at first too, and the copy is released
# after one step that did not write them, so that it costs no memory at the peak. No normalisation layer's statistics
# are as large, which matters because a native batch norm does not count its writes.
LARGE_BYTES = 2**20
_SHAPE, _REQUIRES_GRAD = attrgetter("shape"), attrgetter("requires_grad")


@dataclass(slots=True)
class _BufferSlot:
    """A buffer, parameter or attribute of a module, and the tensor that was there when it was last seen."""

    held: dict[str, Any]
    key: str
    name: str
    tensor: Tensor
    version: int
    was_written: bool = False

    def look(self) -> Tensor:
        now: Tensor | None = self.held.get(self.key)
        return self.tensor if now is None else now

    def is_written(self) -> bool:
        now = self.look()
        return now is not self.tensor or write_count(now) != self.version

    def see(self) -> None:
        self.was_written = self.was_written or self.is_written()
        self.tensor = self.look()
        self.version = write_count(self.tensor)


class _BufferCopies:
    """Copies of buffers of one device and dtype, side by side in one tensor.

    A step looks at all of them by functions that loop in C, and copies them by one call of `cat`: with 50 small buffers
    this takes a third of the time of a loop in Python and a copy each.
    """

    def __init__(self, slots: list[_BufferSlot]) -> None:
        self.slots = slots
        self._owners, self._keys = [slot.held for slot in slots], [slot.key for slot in slots]
        self.is_alone = len(slots) == 1
        tensors = [slot.tensor for slot in slots]
        self._flat = _side_by_side([tensor.detach() for tensor in tensors], is_new=True)
        parts = torch.split(self._flat, [tensor.numel() for tensor in tensors])
        self._views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        self._see(tensors)

    @property
    def is_large(self) -> bool:
        return self.is_alone and self._flat.nbytes > LARGE_BYTES

    def fits(self) -> bool:
        """Look at the buffers anew; return False if they no longer have the kinds and shapes of the copies."""
        now: list[Any] = list(map(dict.get, self._owners, self._keys))  # as the next lines, a loop in C
        if (
            all(map(is_, now, self._tensors))
            and list(map(_SHAPE, now)) == self._shapes
            and list(map(Tensor.data_ptr, now)) == self._pointers
        ):
            return True
        now = [slot.look() for slot in self.slots]
        if any(
            each.shape != view.shape or each.dtype != view.dtype or each.device != view.device
            for each, view in zip(now, self._views, strict=True)
        ):
            return False
        self._see(now)
        return True

    def _see(self, tensors: list[Tensor]) -> None:
        self._tensors, self._shapes = tensors, list(map(_SHAPE, tensors))
        self._pointers = list(map(Tensor.data_ptr, tensors))  # `data` may be set to other memory
        # Views of the buffers, to copy from.
        is_flat = all(tensor.is_contiguous() for tensor in tensors)
        self._sources = [tensor.detach().view(-1) for tensor in tensors] if is_flat else None

    def take(self, unless: Tensor | None) -> None:
        """Copy the buffers, which fit."""
        if self.is_alone:  # of others nobody asks whether they were written
            self.slots[0].see()
        sources = self._sources
        if unless is not None:
            now = _side_by_side(self._tensors if sources is None else sources)
            torch.where(self._is_set(unless), self._flat, now, out=self._flat)
        elif sources is None:
            copy_each(self._views, self._tensors)
        else:
            torch.cat(sources, out=self._flat)

    def restore(self) -> None:
        triples = list(zip(self.slots, self._tensors, self._views, strict=True))
        writable = [(tensor, view) for _, tensor, view in triples if not is_expanded(tensor)]
        _write([tensor for tensor, _ in writable], [view for _, view in writable])
        for slot, tensor, view in triples:
            # The step may have put a new tensor there. One made by expand() cannot be written, only replaced.
            changed = is_expanded(tensor) and write_count(tensor) != slot.version
            slot.held[slot.key] = view.clone() if changed else tensor

    def restore_where(self, flag: Tensor) -> None:
        # Only the device knows the flag, so a new tensor that a module put in a buffer's place has to stay there.
        now = [slot.look() for slot in self.slots]
        chosen = torch.where(self._is_set(flag), self._flat, _side_by_side(now))
        parts = torch.split(chosen, [each.numel() for each in now])
        pairs = [(each, part.view(each.shape)) for part, each in zip(parts, now, strict=True) if not is_expanded(each)]
        _write([each for each, _ in pairs], [part for _, part in pairs])

    def _is_set(self, flag: Tensor) -> Tensor:
        return flag.to(self._flat.device, non_blocking=True) != 0


class BufferKeeper:
    """Copies of a module's buffers from the start of a step, to restore them.

    The copies take as much memory as the buffers; large ones that no step writes are not kept. Nothing waits for the
    device. `note_writes` looks for parameters and tensor attributes that a forward pass has written (a momentum
    encoder, a codebook): they are copied from the next step on.

    Args:
        module: The module that is trained.
        all_state: Whether to look for parameters and attributes too; sharded ones cannot be told.
    """

    def __init__(self, module: Module, *, all_state: bool = True) -> None:
        self._module = module
        self._copies: list[_BufferCopies] | None = None
        self._released: list[_BufferSlot] = []
        self._held = [buffers_of(part) for part in module.modules()]
        self._keys: list[set[str]] = []
        self._n_entries = -1
        self._empty: list[tuple[dict[str, Tensor | None], str]] = []
        self._forward = ForwardWrites(module) if all_state else None

    def keep(self, unless: Tensor | None = None, *, of_batch: bool = True) -> None:
        """Copy the buffers now.

        Args:
            unless: Keep the earlier copies if this 0-dim tensor is not 0; it is read on its device.
            of_batch: True at the beginning of a batch; False before an update in manual optimization.
        """
        if self._copies != [] or self._released or self._has_other_buffers():
            with torch.no_grad():
                self._keep(unless)
        if self._forward is not None:
            self._forward.start(of_batch=of_batch)

    def note_writes(self, updated: Sequence[Tensor], *, goes_on: bool) -> tuple[str, ...]:
        """Return the parameters and attributes that were written since `keep` and cannot be restored.

        Call it before an update. They are copied from the next step on, but for those that the update writes too.

        Args:
            updated: The parameters that the update will write.
            goes_on: Whether `keep` comes before the update, so that it will look like a write of the next forward pass.
        """
        if self._forward is None:
            return ()
        new, trained = self._forward.new_writes(updated, goes_on=goes_on)
        if not new:
            return tuple(trained)
        # A tensor that an attribute no longer holds, and that nobody wrote, is still as it was.
        written = [slot for slot in new if write_count(slot.tensor) != slot.version or slot.look() is slot.tensor]
        with torch.no_grad():
            self._copies = [*(self._copies or ()), *map(_BufferCopies, _by_kind(new))]
        return (*(slot.name for slot in written), *trained)

    def _keep(self, unless: Tensor | None) -> None:
        if self._copies is None or self._has_other_buffers() or not all(copies.fits() for copies in self._copies):
            self._copy_all()
            return
        kept = []
        for copies in self._copies:
            if copies.is_large and not (copies.slots[0].was_written or copies.slots[0].is_written()):
                self._released.append(copies.slots[0])
            else:
                copies.take(unless)
                kept.append(copies)
        for slot in [slot for slot in self._released if slot.is_written()]:
            self._released.remove(slot)
            slot.see()
            kept.append(_BufferCopies([slot]))
        self._copies = kept

    def _copy_all(self) -> None:
        self._keys = [set(held) for held in self._held]
        self._n_entries = sum(map(len, self._held))
        self._empty = [(held, key) for held in self._held for key, each in held.items() if each is None]
        known = [] if self._forward is None else self._forward.known
        for slot in known:
            slot.see()
        self._copies = [_BufferCopies(each) for each in _by_kind([*_slots_of(self._module), *known])]
        self._released = []

    @torch.no_grad()
    def restore(self, where: Tensor | None = None) -> None:
        """Restore the buffers. `where`: only if this 0-dim tensor is not 0, which is decided on the device."""
        for copies in self._copies or ():
            if where is None:
                copies.restore()
            elif copies.fits():
                copies.restore_where(where)
        if where is not None:
            return
        # Of the buffers that a module registered or set since, nothing stays.
        for held, keys in zip(self._held, self._keys, strict=False):
            for key in held.keys() - keys:
                del held[key]
        for held, key in self._empty:
            held[key] = None

    def _has_other_buffers(self) -> bool:
        """Return whether a module has registered a buffer since, or set one that was None."""
        if sum(map(len, self._held)) != self._n_entries:
            return True
        return any(held[key] is not None for held, key in self._empty)

    def unrestored(self) -> list[str]:
        """Return the names of large buffers that were first written since `keep`: they cannot be restored."""
        return [slot.name for slot in self._released if slot.is_written()]

    def known(self) -> list[str]:
        """Return the names of the parameters and attributes that were written in earlier steps: they are copied."""
        return [] if self._forward is None else [slot.name for slot in self._forward.known]


class ForwardWrites:
    """Finds the parameters and tensor attributes that forward passes write or replace, by a tensor's count of writes.

    A write through `.data` is not counted. Where it puts a new tensor in the place of a frozen parameter's, as momentum
    encoders are written, the address tells.

    Attributes:
        known: Those that were written so far.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self.known: list[_BufferSlot] = []
        self._known: set[tuple[int, str]] = set()
        self._slots: list[_BufferSlot] = []
        self._parameters: list[Tensor] = []
        self._owners: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._is_complete = False
        self._writes: list[int] = []
        self._addresses: dict[int, int] = {}
        self._held = [
            (f"{name}.{{}}" if name else "{}", vars(part), len(vars(Module())))
            for name, part in module.named_modules()
            if not type(part).__module__.startswith("torch.")
        ]
        self._attributes: list[_BufferSlot] = []
        self._ignored: set[int] = set()

    def start(self, *, of_batch: bool) -> None:
        """Note how often each tensor was written until now. `of_batch`: no update is about to be made."""
        if of_batch:
            self._ignored.clear()
        if not self._is_complete:
            self._list_parameters()
        for i in self._replaced():
            self._slots[i].see()
            self._parameters[i] = self._slots[i].tensor
        self._writes = list(map(WRITE_COUNT, self._parameters))
        self._addresses = {}
        if not all(map(_REQUIRES_GRAD, self._parameters)):
            self._addresses = {i: p.data_ptr() for i, p in enumerate(self._parameters) if not p.requires_grad}
        self._attributes = [
            _BufferSlot(held, key, name.format(key), value, write_count(value))
            for name, held, n in self._held
            if Tensor in map(type, held.values())  # most modules have none
            for key, value in islice(held.items(), n, None)
            # What has a graph or is large is kept for someone to look at: holding it would cost memory.
            if type(value) is Tensor and not value.requires_grad and _n_bytes(value) <= LARGE_BYTES
            if not value.is_inference() and value.layout == torch.strided and not value.is_meta
        ]

    def new_writes(self, updated: Sequence[Tensor], *, goes_on: bool) -> tuple[list[_BufferSlot], list[str]]:
        """Return what was written since `start` for the first time, and the names of weights in training that were.

        The latter are not copied; arguments as in `note_writes`.
        """
        now, replaced = list(map(WRITE_COUNT, self._parameters)), self._replaced()
        if now == self._writes and not self._addresses and not self._attributes and not replaced:
            if goes_on:
                self._ignored.update(map(id, updated))
            return [], []
        indices = (
            [i for i, (a, b) in enumerate(zip(now, self._writes, strict=True)) if a != b] if now != self._writes else []
        )
        indices += [i for i, address in self._addresses.items() if self._parameters[i].data_ptr() != address]
        ids = set(map(id, updated))
        for i in (*indices, *replaced):
            self._slots[i].version = self._writes[i]
        changed = [self._slots[i] for i in dict.fromkeys(indices) if id(self._parameters[i]) not in self._ignored]
        trained = [slot.name for slot in changed if id(slot.tensor) in ids]
        found = [slot for slot in changed if id(slot.tensor) not in ids]
        found += [self._slots[i] for i in replaced if self._slots[i] not in changed]
        found += [slot for slot in self._attributes if slot.is_written()]
        new = [slot for slot in found if (id(slot.held), slot.key) not in self._known]
        for slot in new:
            slot.was_written = True
        self._known.update((id(slot.held), slot.key) for slot in new)
        self.known += new
        self._ignored |= ids if goes_on else set()
        return new, trained

    def _replaced(self) -> list[int]:
        """Return the indices of the parameters in whose place their modules hold other ones by now.

        The weights of a codebook may become a new parameter in each forward pass, which no optimizer knows.
        """
        now = list(map(dict.get, self._owners, self._keys))
        if all(map(is_, now, self._parameters)):  # a loop in C
            return []
        return [i for i, (a, b) in enumerate(zip(now, self._parameters, strict=True)) if a is not b and a is not None]

    def _list_parameters(self) -> None:
        self._slots = [
            _BufferSlot(parameters_of(owner), key, f"{prefix}.{key}" if prefix else key, p, 0)
            for prefix, owner in self._module.named_modules()
            for key, p in parameters_of(owner).items()
            if type(p) is Parameter and not is_lazy(p) and not p.is_inference() and p.layout == torch.strided
        ]
        self._parameters = [slot.tensor for slot in self._slots]
        self._owners, self._keys = [slot.held for slot in self._slots], [slot.key for slot in self._slots]
        self._is_complete = not any(map(is_lazy, self._module.parameters()))


def _slots_of(module: Module) -> list[_BufferSlot]:
    return [
        _BufferSlot(buffers_of(owner), key, f"{prefix}.{key}" if prefix else key, buffer, write_count(buffer))
        for prefix, owner in module.named_modules()
        for key, buffer in buffers_of(owner).items()
        # Distributed, quantized and not yet initialised buffers are subclasses that cannot be laid side by side.
        if type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta
    ]


def _write(to: list[Tensor], values: list[Tensor]) -> None:
    # Through `.data`, which does not count as a write: a graph may still need these buffers for a second backward pass.
    if to:
        copy_each([each.data for each in to], values)


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share memory, as after expand(): such a tensor cannot be written."""
    return any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _side_by_side(tensors: list[Tensor], *, is_new: bool = False) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 and not is_new else torch.cat(flat)


def _by_kind(slots: list[_BufferSlot]) -> list[list[_BufferSlot]]:
    """Group small buffers by device and dtype, and put each large or expanded one into a group of its own."""
    groups: dict[object, list[_BufferSlot]] = defaultdict(list)
    for slot in slots:
        tensor = slot.tensor
        alone = id(slot) if _n_bytes(tensor) > LARGE_BYTES or is_expanded(tensor) else None
        groups[tensor.device, tensor.dtype, alone].append(slot)
    return list(groups.values())


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
