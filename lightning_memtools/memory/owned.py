"""The memory that a model and its optimizers own on a device, by category."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from lightning_memtools._torch import storage_id
from lightning_memtools.memory.nested_tensors import named_tensors, plain_name
from lightning_memtools.memory.stats import MemoryReader

OnDevice = Callable[[Tensor], bool]
"""Returns whether a tensor's memory is on the device."""


@runtime_checkable
class KnowsItsTensors(Protocol):
    """A simulated device. Its tensors are really CPU tensors, so only the device can tell which tensors it holds."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory is on this device."""

    def address_of(self, tensor: Tensor) -> int | None:
        """Return the address of the tensor's memory block on this device; None if it has no block there."""


def on_device_of(reader: MemoryReader, device: torch.device) -> OnDevice:
    """Return a function that tells whether a tensor is on a device.

    Args:
        reader: Reads the device's memory. A simulated device is its own reader, and knows its tensors.
        device: The `torch.device` of the tensors, used if the reader is not a simulated device.
    """
    if isinstance(reader, KnowsItsTensors):
        return reader.holds
    if device.index is None:
        return lambda tensor: tensor.device.type == device.type
    return lambda tensor: tensor.device == device  # one look, which a model's thousand tensors feel


# The size of every block is a multiple of this (see allocator/block_rounding.py).
_GRANULE = 512


@dataclass(frozen=True, slots=True)
class Owned:
    """The memory that a model, its optimizers and the inputs occupy.

    Attributes:
        by_category: Bytes of parameters, buffers, gradients, optimizer state and inputs, as the allocator rounds them.
        storages: The ids of the storages that were counted. They are valid while the tensors are alive.
    """

    by_category: Mapping[str, int]
    storages: frozenset[int]

    @property
    def total_bytes(self) -> int:
        """The bytes of all categories together."""
        return sum(self.by_category.values())


def owned_by(model: nn.Module, optimizers: Iterable[Optimizer], on_device: OnDevice, *, inputs: Any = None) -> Owned:
    """Return the memory that a model, its optimizers and inputs occupy on a device, counting each storage once.

    Args:
        model: Its parameters, buffers and gradients are counted.
        optimizers: Their state is counted.
        on_device: Returns whether a tensor is on the device.
        inputs: A batch, or any other nested container of tensors that are in use now; they are counted too.
    """
    seen: set[int] = set()
    tensors: dict[str, list[Tensor]] = {category: [] for category in CATEGORIES_OF_OWNERS}
    for owned in owned_tensors(model, optimizers, inputs):
        tensors[owned.category].append(owned.tensor)
    by_category = {category: bytes_on_device(those, on_device, seen) for category, those in tensors.items()}
    return Owned(by_category, frozenset(seen))


def bytes_on_device(tensors: Iterable[Any], on_device: OnDevice, seen: set[int]) -> int:
    """Return the bytes that tensors occupy on the device. Skip storages with an id in `seen`, and add new ids to it."""
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not on_device(tensor):
            continue
        found = storage_of(tensor)
        if found is not None and found[0] not in seen:
            seen.add(found[0])
            total += block_bytes(found[1])
    return total


CATEGORIES_OF_OWNERS = ("parameters", "buffers", "gradients", "optimizer", "inputs")


class OwnedTensor(NamedTuple):
    """A tensor that a model, an optimizer or a batch owns.

    Attributes:
        category: One of `CATEGORIES_OF_OWNERS`.
        tensor: The tensor.
        owner: The tensor's name; for a gradient or optimizer state, the name of the parameter.
        suffix: What follows `owner` in the tensor's full name: ".grad", a key such as '["exp_avg"]', or "".
        module: The path of its module, empty for the model itself; None if it belongs to no module.
        optimizer: For a tensor of optimizer state, the optimizer; otherwise None.
    """

    category: str
    tensor: Tensor
    owner: str
    suffix: str = ""
    module: str | None = None
    optimizer: Optimizer | None = None


def owned_tensors(model: nn.Module, optimizers: Iterable[Optimizer], inputs: Any) -> Iterator[OwnedTensor]:
    """Yield the tensors of a model, its optimizers and a batch, category by category, parameters first."""
    parameters: dict[int, OwnedTensor] = {}
    buffers: list[OwnedTensor] = []
    for path, module in model.named_modules():
        prefix = f"{plain_name(path)}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in parameters:
                parameters[id(parameter)] = OwnedTensor("parameters", parameter, f"{prefix}{name}", "", path)
        for name, buffer in module.named_buffers(recurse=False):
            buffers.append(OwnedTensor("buffers", buffer, f"{prefix}{name}", "", path))
    yield from parameters.values()
    yield from buffers
    for _, parameter, name, _, path, _ in parameters.values():
        if isinstance(parameter.grad, Tensor):
            yield OwnedTensor("gradients", parameter.grad, name, ".grad", path)
    for optimizer in optimizers:
        yield from _states_of(optimizer, parameters)
    for name, tensor in named_tensors(inputs, "batch"):
        yield OwnedTensor("inputs", tensor, name)


def _states_of(optimizer: Optimizer, parameters: Mapping[int, OwnedTensor]) -> Iterator[OwnedTensor]:
    for parameter, state in optimizer.state.items():
        known = parameters.get(id(parameter))
        name, path = (type(optimizer).__name__, None) if known is None else (known.owner, known.module)
        # This is nearly always a flat dict of tensors; only L-BFGS and the like nest lists.
        for key, value in state.items() if isinstance(state, dict) else (("state", state),):
            suffix = f'["{key}"]'
            if isinstance(value, Tensor):
                yield OwnedTensor("optimizer", value, name, suffix, path, optimizer)
            else:
                for inner, tensor in named_tensors(value, suffix):
                    yield OwnedTensor("optimizer", tensor, name, inner, path, optimizer)


def cuda_address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory on a CUDA device; None if it has none there."""
    found = storage_of(tensor) if tensor.is_cuda else None
    return None if found is None else found[1].data_ptr()


def composition_of(owned: Owned, allocated: int, *, older: int = 0) -> dict[str, int]:
    """Split the allocated bytes into categories such as parameters and activations, which add up to `allocated`.

    Bytes without an owner count as activations: results kept for backward, and temporaries.

    Args:
        owned: The bytes that a model, its optimizers or a batch own.
        allocated: All allocated bytes.
        older: The bytes without an owner that were already allocated before the batch. They are not activations; like
            buffers, they count as "other".
    """
    known = owned.by_category
    # Views of larger storages can seem to take more than is allocated.
    rest = max(0, allocated - owned.total_bytes)
    older = min(rest, older)
    return {
        "parameters": known["parameters"],
        "gradients": known["gradients"],
        "optimizer": known["optimizer"],
        "activations": rest - older,
        "inputs": max(0, min(known["inputs"], allocated - (owned.total_bytes - known["inputs"]))),
        "other": older + known["buffers"],
    }


def storage_of(tensor: Tensor) -> tuple[int, UntypedStorage] | None:
    """Return a tensor's storage as a pair (id, storage). For a DTensor, it is the storage of this rank's shard.

    Return None for a tensor without a storage of its own: a sparse or nested tensor, which consists of several
    tensors, or an uninitialized parameter of a lazy module.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None
    return storage_id(storage), storage


def block_bytes(storage: UntypedStorage) -> int:
    """Return the size in bytes of the memory block that holds a storage, with the default allocator settings."""
    return -(-storage.nbytes() // _GRANULE) * _GRANULE
