"""Which tensors live on a device, and since when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from lightning_memtools.memory.owned import OnDevice, block_bytes, storage_of


@dataclass(frozen=True, slots=True)
class Survivor:
    """A tensor that lives on the device.

    Attributes:
        tensor: The tensor; of several that share a storage, one.
        n_bytes: What its storage takes.
        born: The number of the census that saw it first.
    """

    tensor: Tensor
    n_bytes: int
    born: int

    @property
    def signature(self) -> tuple[torch.Size, torch.dtype]:
        """What tensors of the same origin have in common."""
        return self.tensor.shape, self.tensor.dtype


class Census:
    """Counts the living tensors now and then, and remembers when each was first seen, without keeping any alive.

    A census walks over all objects that Python's garbage collector knows: some 20 to 100 ms per million.
    """

    def __init__(self, on_device: OnDevice) -> None:
        self._on_device = on_device
        self._births: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self.number = 0

    def take(self, leave_out: Collection[int] = ()) -> list[Survivor]:
        """All tensors on the device now, but for those whose storages (see `storage_of`) are to be left out."""
        self.number += 1
        seen = set(leave_out)
        survivors: list[Survivor] = []
        births: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        for tensor in _all_tensors():
            if not self._on_device(tensor):
                continue
            found = storage_of(tensor)
            if found is None or found[0] in seen or found[1].nbytes() == 0:
                continue
            key, storage = found
            seen.add(key)
            reference, born = self._births.get(key, (None, 0))
            if reference is None or reference() is not storage:  # the address belonged to one that died
                # Of the storage: torch.utils.swap_tensors refuses tensors with weak references.
                reference, born = weakref.ref(storage), self.number
            births[key] = reference, born
            survivors.append(Survivor(tensor, block_bytes(storage), born))
        self._births = births
        return survivors

    def restart(self) -> None:
        """Forget all births."""
        self._births.clear()
        self.number = 0


def _all_tensors() -> list[Tensor]:
    # Whoever refers to a class: its instances and a few others. A third of the time of looking at all objects in
    # Python. And by exact types: isinstance would run code of proxies and mocks that are somewhere among millions.
    kinds = {kind for kind in _with_subclasses(Tensor) if _has_storage(kind)}
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def _has_storage(kind: type) -> bool:
    # Torch's other subclasses wrap tensors, which are found by themselves; every class more costs time.
    return not kind.__module__.startswith("torch.") or issubclass(kind, Parameter)
