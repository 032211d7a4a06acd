"""Finds the tensors with storages of their own that a tensor of any kind consists of."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_memtools._torch import FakeTensor, is_wrapper_subclass, storage_id, uncoalesced_parts
from lightning_memtools.warning_categories import DegradedWarning

_COMPRESSED_ROWS = {torch.sparse_csr, torch.sparse_bsr}
_COMPRESSED_COLUMNS = {torch.sparse_csc, torch.sparse_bsc}
_not_counted: set[str] = set()


def on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the CPU, whose memory stands for the memory of the simulated device."""
    # A fake tensor's real device is meta, and reading its `device` costs a dispatch.
    return tensor.fake_device.type == "cpu" if isinstance(tensor, FakeTensor) else tensor.is_cpu


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a tensor's data, each with one storage.

    These are the tensor itself if it is dense, quantized or nested; the indices and values of a sparse tensor; and the
    wrapped tensors of a wrapper subclass (DTensor, jagged). Other kinds are skipped, with one warning per kind.
    """
    if is_lazy(tensor):  # has no shape yet
        return
    if is_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor also names its device mesh
                yield from parts(part)
    elif tensor.layout is torch.strided:
        with suppress(NotImplementedError):  # within a transform of torch.func, tensors wrap those that hold the data
            tensor.untyped_storage()
            yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from uncoalesced_parts(tensor)
    elif tensor.layout in _COMPRESSED_ROWS:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in _COMPRESSED_COLUMNS:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        _say_not_counted(f"{type(tensor).__name__} with layout {tensor.layout}")


def own_storages(tensor: torch.Tensor) -> Iterable[torch.UntypedStorage]:
    """Return the storages that hold a tensor's data: nearly always one."""
    try:
        return (tensor.untyped_storage(),)
    except NotImplementedError:
        return [part.untyped_storage() for part in parts(tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Return the id of a tensor's storage; the tensor must have one (see `parts`)."""
    return storage_id(tensor.untyped_storage())


def flat(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments or results, including those in lists and tuples."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (tuple, list)):
                yield from (item for item in value if isinstance(item, torch.Tensor))


def given_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among all arguments of an operator, in the order of the arguments."""
    return list(flat((*args, *kwargs.values())))


def storages_of(args: Any, kwargs: Any) -> set[int]:
    """Return the ids of the storages of an operator's arguments."""
    return {storage_id(storage) for tensor in given_tensors(args, kwargs) for storage in own_storages(tensor)}


def _say_not_counted(kind: str) -> None:
    if kind in _not_counted:
        return
    _not_counted.add(kind)
    warnings.warn(
        f"The virtual device cannot see the memory of a {kind}: such tensors are not counted.",
        DegradedWarning,
        stacklevel=2,
    )
