"""What a model and its optimizers are known to hold on a device, by category."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from lightning_memtools._torch import storage_id, tree_leaves
from lightning_memtools.memory.stats import MemoryReader

OnDevice = Callable[[Tensor], bool]
"""Tells whether a tensor's memory is the device's."""


@runtime_checkable
class KnowsItsTensors(Protocol):
    """A device that says itself which tensors it holds, as a simulated one must: they all are CPU tensors."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is this device's."""


def on_device_of(reader: MemoryReader, device: torch.device) -> OnDevice:
    """Tells which tensors' memory the reader's figures are about.

    Args:
        reader: What reads the device.
        device: Where PyTorch puts its tensors.
    """
    if isinstance(reader, KnowsItsTensors):
        return reader.holds
    return lambda tensor: (
        tensor.device.type == device.type and (device.index is None or tensor.device.index == device.index)
    )


# The allocator gives out multiples of this (see allocator/rounding.py).
_GRANULE = 512


@dataclass(frozen=True, slots=True)
class Owned:
    """The memory that a model is known to hold.

    Attributes:
        by_category: Bytes of parameters, buffers, gradients and optimizer state, as the allocator rounds them.
        storages: The identities of their storages, for as long as the tensors live.
    """

    by_category: Mapping[str, int]
    storages: frozenset[int]

    @property
    def total_bytes(self) -> int:
        """All categories together."""
        return sum(self.by_category.values())


def owned_by(model: nn.Module, optimizers: Iterable[Optimizer], on_device: OnDevice, *, inputs: Any = None) -> Owned:
    """Add up what a model's tensors occupy on the device, each storage once.

    Args:
        model: Its parameters, buffers and gradients are counted.
        optimizers: Their state is counted.
        on_device: Which tensors count.
        inputs: A batch, or anything else that holds tensors and is expected to be there now.
    """
    seen: set[int] = set()

    def count(tensors: Iterable[Any]) -> int:
        total = 0
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not on_device(tensor):
                continue
            found = storage_of(tensor)
            if found is not None and found[0] not in seen:
                seen.add(found[0])
                total += block_bytes(found[1])
        return total

    parameters = list(model.parameters())
    by_category = {
        "parameters": count(parameters),
        "buffers": count(model.buffers()),
        "gradients": count(parameter.grad for parameter in parameters),
        "optimizer": count(_state_of(optimizers)),
        "inputs": count(tree_leaves(inputs)),
    }
    return Owned(by_category, frozenset(seen))


def storage_of(tensor: Tensor) -> tuple[int, UntypedStorage] | None:
    """The storage of a tensor (of a DTensor: that of this rank's shard) and its identity.

    None where a tensor has no storage of its own: sparse, nested and other layouts that are made of several tensors.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return storage_id(storage), storage


def block_bytes(storage: UntypedStorage) -> int:
    """What the allocator gives out for a storage, with its default settings."""
    return -(-storage.nbytes() // _GRANULE) * _GRANULE


def _state_of(optimizers: Iterable[Optimizer]) -> Iterable[Any]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            # Nearly always a flat dict of tensors; only L-BFGS and the like nest lists.
            for value in state.values() if isinstance(state, dict) else (state,):
                if isinstance(value, Tensor):
                    yield value
                else:
                    yield from tree_leaves(value)
