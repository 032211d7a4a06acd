"""What an operator can do to storages, read from its schema once."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
from torch._ops import OpOverload


class Kind(Enum):
    """What has to be looked at after an operator has run."""

    NOTHING = auto()  # It returns views of its inputs, its inputs themselves, or no tensors.
    FRESH = auto()  # It may return new storages.
    LIFTED = auto()  # It returns its input, which is new all the same: torch.tensor and from_numpy end with it.
    RESIZED = auto()  # It may give its first argument a storage of another size, or another storage.
    OUT = auto()  # It writes to tensors given as `out`, and resizes them when they do not fit.
    DETACHED = auto()  # Autograd stores a gradient by detaching it.
    COMPOSED = auto()  # It is made of other operators, which are looked at in its place.


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_NAMED = {
    "aten::lift_fresh": Kind.LIFTED,
    "aten::lift": Kind.LIFTED,
    "aten::detach": Kind.DETACHED,
    "aten::resize_": Kind.RESIZED,
    "aten::resize_as_": Kind.RESIZED,
    "aten::_resize_output_": Kind.RESIZED,
    "aten::set_": Kind.RESIZED,
}
# Namespaces of operators that make no tensors, and are called very often.
_NO_TENSORS = {"prim", "profiler"}
# The operators for which torch calls cuBLAS on a GPU.
_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot"}


def kind_of(func: Any) -> Kind:
    """The kind of an operator; of anything but an OpOverload, such as a higher-order operator, `Kind.FRESH`."""
    if not isinstance(func, OpOverload):
        return Kind.FRESH
    schema = func._schema
    if schema.name in _NAMED:
        return _NAMED[schema.name]
    if func.namespace in _NO_TENSORS:
        return Kind.NOTHING
    if _is_composed(func):
        return Kind.COMPOSED
    if any(argument.is_out for argument in schema.arguments):
        return Kind.OUT
    makes_new = any(_may_hold_tensors(out.type) and out.alias_info is None for out in schema.returns)
    return Kind.FRESH if makes_new else Kind.NOTHING


def is_matmul(func: Any) -> bool:
    """Whether cuBLAS computes this operator on a GPU."""
    return isinstance(func, OpOverload) and func._schema.name in _MATMULS


def compose(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of `Kind.COMPOSED` by the operators it is made of."""
    return func._op_dk(_COMPOSITE, *args, **kwargs)


def _is_composed(func: OpOverload) -> bool:
    # Under inference_mode these arrive whole: their schemas promise aliases that reshape, contiguous, to do not keep.
    # Only kernels in C++ count: the Python decompositions that `func.decompose` prefers compute other roundings.
    name = func._schema.name if not func._schema.overload_name else f"{func._schema.name}.{func._schema.overload_name}"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def _may_hold_tensors(kind: torch.JitType) -> bool:
    return "Tensor" in str(kind) or "Any" in str(kind)
