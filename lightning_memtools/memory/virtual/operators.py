"""Classifies operators by their effect on storages: they make or resize some, or none."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch

from lightning_memtools._torch import OpOverload, has_kernel, operator_schema


class OperatorKind(Enum):
    """The effects that an operator can have on storages, such as making new ones or resizing them."""

    NOTHING = auto()  # It returns views of its inputs, its inputs themselves, or no tensors.
    FRESH = auto()  # It may return new storages.
    LIFTED = auto()  # It returns its input, whose storage is new: torch.tensor and from_numpy end with it.
    RESIZED = auto()  # It may give its first argument a storage of another size, or another storage.
    OUT = auto()  # It writes to tensors given as `out`, and resizes them if they have another size.
    DETACHED = auto()  # Autograd stores a gradient by detaching it.
    COMPOSED = auto()  # It consists of other operators, which are classified in its place.


_NAMED = {
    "aten::lift_fresh": OperatorKind.LIFTED,
    "aten::lift": OperatorKind.LIFTED,
    "aten::detach": OperatorKind.DETACHED,
    "aten::resize_": OperatorKind.RESIZED,
    "aten::resize_as_": OperatorKind.RESIZED,
    "aten::_resize_output_": OperatorKind.RESIZED,
    "aten::set_": OperatorKind.RESIZED,
}
# Namespaces of operators that make no tensors, and are called very often.
_NO_TENSORS = {"prim", "profiler"}
# The operators for which torch calls cuBLAS on a GPU.
_MATMULS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot",
    "aten::_trilinear", "aten::_euclidean_dist", "torch_nn::_linear_cross_entropy_batch_chunked",
}  # fmt: skip


def kind_of(func: Any) -> OperatorKind:
    """Return how an operator affects storages. If it is not an OpOverload, assume new storages (FRESH)."""
    if not isinstance(func, OpOverload):
        return OperatorKind.FRESH
    schema = operator_schema(func)
    if schema.name in _NAMED:
        return _NAMED[schema.name]
    if func.namespace in _NO_TENSORS:
        return OperatorKind.NOTHING
    if _is_composed(func):
        return OperatorKind.COMPOSED
    if any(argument.is_out for argument in schema.arguments):
        return OperatorKind.OUT
    makes_new = any(_may_hold_tensors(out.type) and out.alias_info is None for out in schema.returns)
    return OperatorKind.FRESH if makes_new else OperatorKind.NOTHING


def is_matmul(func: Any) -> bool:
    """Return whether an operator is a matrix product, which cuBLAS computes on a GPU."""
    return isinstance(func, OpOverload) and operator_schema(func).name in _MATMULS


def _is_composed(func: OpOverload) -> bool:
    # Under inference_mode these operators are not split before they get here, and the schemas of reshape, contiguous
    # and `to` promise aliases that they do not return. Only kernels in C++ count: the Python decompositions that
    # `func.decompose` prefers round differently.
    schema = operator_schema(func)
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def _may_hold_tensors(kind: torch.JitType) -> bool:
    return "Tensor" in str(kind) or "Any" in str(kind)
