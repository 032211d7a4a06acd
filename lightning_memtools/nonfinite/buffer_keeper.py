"""Keeps buffers (BatchNorm statistics, queues, codebooks) as they were when a step began: forward passes write them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

# Larger buffers are mostly constants (masks, position tables). They are kept from the start too, and let go after one
# step that left them alone, so that they cost no memory when the peak comes. No normalisation layer's statistics are as
# large, which matters because a native batch norm does not count its writes in `_version`.
LARGE_BYTES = 2**20


@dataclass(slots=True)
class _Place:
    """Where a module keeps a buffer, and the tensor seen there when it was last copied."""

    module: Module
    key: str
    name: str
    tensor: Tensor
    version: int
    was_written: bool = False

    def look(self) -> Tensor:
        now = self.module._buffers[self.key]  # noqa: SLF001, getattr() on a Module is slow and this runs every step
        return self.tensor if now is None else now

    def is_written(self) -> bool:
        now = self.look()
        return now is not self.tensor or now._version != self.version  # noqa: SLF001, the only way to see a write

    def see(self) -> None:
        self.was_written = self.was_written or self.is_written()
        self.tensor = self.look()
        self.version = self.tensor._version  # noqa: SLF001, as above


class _Copies:
    """Copies of buffers of one device and dtype, side by side in one tensor: a step costs a few kernels for all."""

    def __init__(self, places: list[_Place]) -> None:
        self.places = places
        self._flat = torch.cat([place.tensor.reshape(-1) for place in places])
        self._views = [
            part.view(place.tensor.shape)
            for part, place in zip(torch.split(self._flat, [p.tensor.numel() for p in places]), places, strict=True)
        ]

    def fits(self) -> bool:
        return all(
            now.shape == view.shape and now.dtype == view.dtype and now.device == view.device
            for now, view in zip((place.look() for place in self.places), self._views, strict=True)
        )

    def take(self, unless: Tensor | None) -> None:
        for place in self.places:
            place.see()
        if unless is None:
            torch._foreach_copy_(self._views, [place.tensor for place in self.places])
            return
        torch.where(
            self._is_set(unless), self._flat, _side_by_side([place.tensor for place in self.places]), out=self._flat
        )

    def put_back(self) -> None:
        torch._foreach_copy_([place.tensor for place in self.places], self._views)
        for place in self.places:
            place.module._buffers[place.key] = place.tensor  # noqa: SLF001, the step may have put a new tensor there

    def put_back_where(self, flag: Tensor) -> None:
        # Only the device knows the flag, so a new tensor that a module put in a buffer's place has to stay there.
        now = [place.look() for place in self.places]
        chosen = torch.where(self._is_set(flag), self._flat, _side_by_side(now))
        parts = torch.split(chosen, [each.numel() for each in now])
        torch._foreach_copy_(now, [part.view(each.shape) for part, each in zip(parts, now, strict=True)])

    def _is_set(self, flag: Tensor) -> Tensor:
        return flag.to(self._flat.device, non_blocking=True) != 0


class BufferKeeper:
    """Copies of a module's buffers at the start of a step, to put back.

    The copies take as much memory as the buffers; large ones that no step writes are not kept. Nothing waits for the
    device.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._copies: list[_Copies] | None = None
        self._let_go: list[_Place] = []

    @torch.no_grad()
    def keep(self, unless: Tensor | None = None) -> None:
        """Take copies now. `unless`: a 0-dim tensor on a device; where it is not 0, the earlier copies stay."""
        if self._copies is None or not all(copies.fits() for copies in self._copies):
            self._copies = [_Copies(places) for places in _by_kind(_places(self._module))]
            self._let_go = []
            return
        for copies in self._copies:
            if _is_large(copies) and not copies.places[0].was_written and not copies.places[0].is_written():
                self._let_go.append(copies.places[0])
            else:
                copies.take(unless)
        gone = {id(place) for place in self._let_go}
        self._copies = [copies for copies in self._copies if id(copies.places[0]) not in gone]
        self._take_up_written()

    @torch.no_grad()
    def put_back(self, where: Tensor | None = None) -> None:
        """Write the copies into the buffers. `where`: only if this 0-dim tensor is not 0, decided on the device."""
        for copies in self._copies or ():
            if where is None:
                copies.put_back()
            elif copies.fits():
                copies.put_back_where(where)

    def unkept(self) -> list[str]:
        """Large buffers that were written for the first time since `keep`: they cannot be put back."""
        return [place.name for place in self._let_go if place.is_written()]

    def _take_up_written(self) -> None:
        for place in [place for place in self._let_go if place.is_written()]:
            self._let_go.remove(place)
            place.see()
            assert self._copies is not None
            self._copies.append(_Copies([place]))


def _places(module: Module) -> list[_Place]:
    return [
        _Place(owner, key, f"{prefix}.{key}" if prefix else key, buffer, buffer._version)  # noqa: SLF001, as above
        for prefix, owner in module.named_modules()
        for key, buffer in owner._buffers.items()  # noqa: SLF001, named_buffers() does not tell the owner
        # Distributed, quantized and not yet initialised buffers are subclasses that cannot be laid side by side.
        if type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta
    ]


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _by_kind(places: list[_Place]) -> list[list[_Place]]:
    """Small buffers by device and dtype; each large one alone."""
    groups: dict[object, list[_Place]] = defaultdict(list)
    for place in places:
        tensor = place.tensor
        alone = id(place) if _n_bytes(tensor) > LARGE_BYTES else None
        groups[tensor.device, tensor.dtype, alone].append(place)
    return list(groups.values())


def _is_large(copies: _Copies) -> bool:
    return len(copies.places) == 1 and _n_bytes(copies.places[0].tensor) > LARGE_BYTES


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
