"""What a model and its optimizers are known to hold on a device, by category."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

OnDevice = Callable[[Tensor], bool]
"""Tells whether a tensor's memory is the device's."""

# The allocator gives out multiples of this, so what is owned is counted in them (see allocator/rounding.py).
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
            if isinstance(tensor, Tensor) and on_device(tensor):
                key, n_bytes = storage_of(tensor)
                if key not in seen:
                    seen.add(key)
                    total += -(-n_bytes // _GRANULE) * _GRANULE
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


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """The identity of a tensor's storage, equal for views and unique among living storages, and its size in bytes.

    0 bytes where a tensor has no storage (sparse and other wrapped layouts).
    """
    if hasattr(tensor, "to_local"):  # DTensor: this rank's shard
        tensor = tensor.to_local()
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()  # noqa: SLF001, data_ptr is 0 for fake and for empty tensors
    except (NotImplementedError, RuntimeError):
        return id(tensor), 0


def _state_of(optimizers: Iterable[Optimizer]) -> Iterable[Any]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            # Nearly always a flat dict of tensors; only L-BFGS and the like nest lists.
            for value in state.values() if isinstance(state, dict) else (state,):
                if isinstance(value, Tensor):
                    yield value
                else:
                    yield from tree_leaves(value)
