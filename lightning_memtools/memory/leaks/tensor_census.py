"""Counts the tensors that live on a device."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from lightning_memtools.memory.leaks.holders import all_tensors
from lightning_memtools.memory.owned import OnDevice, block_bytes, storage_of

_MAX_SIGNATURES = 8


@dataclass(frozen=True, slots=True)
class LivingTensor:
    """The live tensors on the device that share one storage.

    Attributes:
        key: The id of the storage (`storage_of`).
        tensors: The tensors.
        n_bytes: The memory that the storage occupies.
        born: The number of the census (`TensorCensus.take`) in which the storage was first seen.
        owners: The leaf tensors whose gradients are in the storage.
    """

    key: int
    tensors: list[Tensor]
    n_bytes: int
    born: int
    owners: list[Tensor]

    @property
    def signature(self) -> tuple[torch.Size, torch.dtype]:
        """The shape and dtype, which tensors made by the same line of code usually share."""
        return self.tensors[0].shape, self.tensors[0].dtype

    @property
    def has_graph(self) -> bool:
        """True if any tensor that shares this storage has an autograd graph."""
        return any(tensor.grad_fn is not None for tensor in self.tensors)


class TensorCensus:
    """Lists the living tensors on demand, and remembers when each was first seen, without keeping any alive.

    Each call of `take` visits all objects that Python's garbage collector tracks, which takes 20 to 100 ms per million.
    """

    def __init__(self, on_device: OnDevice) -> None:
        self._on_device = on_device
        self._births: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self.number = 0

    def take(self, leave_out: Collection[int] = ()) -> list[LivingTensor]:
        """Return the tensors on the device now, except those with a storage id (`storage_of`) in `leave_out`."""
        self.number += 1
        living: dict[int, LivingTensor] = {}
        births: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        for tensor, owner in _with_gradients(all_tensors()):
            if not self._on_device(tensor):
                continue
            found = storage_of(tensor)
            if found is None or found[0] in leave_out or found[1].nbytes() == 0:
                continue
            key, storage = found
            owners = [] if owner is None else [owner]
            if key in living:
                living[key].tensors.append(tensor)
                living[key].owners.extend(owners)
                continue
            reference, born = self._births.get(key, (None, 0))
            if reference is None or reference() is not storage:  # the address belonged to one that was freed
                # The reference is to the storage: torch.utils.swap_tensors refuses tensors with weak references.
                reference, born = weakref.ref(storage), self.number
            births[key] = reference, born
            living[key] = LivingTensor(key, [tensor], block_bytes(storage), born, owners)
        self._births = births
        return list(living.values())

    def restart(self) -> None:
        """Forget when the tensors were first seen."""
        self._births.clear()
        self.number = 0


def _with_gradients(tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (tensor, None) for each tensor, and (gradient, tensor) if it has a gradient, which gc does not list."""
    for tensor in tensors:
        yield tensor, None
        if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad, tensor


def blocks_to_walk() -> int:
    """Return about how many memory blocks belong to objects that Python's garbage collector visits.

    The number is used to estimate how long a pass over all objects takes. Objects that `gc.freeze` has hidden are not
    counted. With torch and Lightning imported, an object takes about four blocks.
    """
    return max(0, sys.getallocatedblocks() - 4 * gc.get_freeze_count())


def largest_signatures(living: Iterable[LivingTensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the signatures (shape and type) whose tensors take up the most bytes in total, largest first."""
    sizes: Counter[tuple[torch.Size, torch.dtype]] = Counter()
    for one in living:
        sizes[one.signature] += one.n_bytes
    return [signature for signature, _ in sizes.most_common(_MAX_SIGNATURES)]


def bytes_of(pile: Sequence[LivingTensor]) -> int:
    """Return the total size of the tensors' storages in bytes."""
    return sum(one.n_bytes for one in pile)


def count_by_kind(tensors: Iterable[Tensor]) -> dict[tuple[tuple[int, ...], str], int]:
    """Return the number of tensors of each shape and type, sorted by frequency and then size, largest first."""
    counts = Counter((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)
    return dict(sorted(counts.items(), key=lambda kind: (-kind[1], -math.prod(kind[0][0]))))
