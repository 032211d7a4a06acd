"""Classifies operators by their effect on storages (they make or resize some), and finds sums of gradients.

Autograd adds a gradient to an earlier one of the same tensor in place, if nothing else refers to the earlier one. Under
a dispatch mode, and for fake tensors, autograd cannot tell and makes a new tensor: in a network with residual
connections that is one more tensor of the size of an activation, while both others exist. `is_gradient_sum` finds these
sums by the condition of ``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp.
"""

from __future__ import annotations

import math
import sys
from enum import Enum, auto
from functools import cache
from typing import Any

import torch

from lightning_memtools._torch import (
    CAN_COUNT_REFERENCES,
    OperatorMode,
    OpOverload,
    current_graph_task,
    has_kernel,
    operator_schema,
    reference_counts,
    run_composite,
    without_dispatch_modes,
)


class OperatorKind(Enum):
    """An operator's effect on storages."""

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
    """Return an operator's kind. For anything but an OpOverload, such as a higher-order operator, it is FRESH."""
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
    """Return whether cuBLAS computes this operator on a GPU."""
    return isinstance(func, OpOverload) and operator_schema(func).name in _MATMULS


LT_WORKSPACE = 2**20
"""The bytes of cuBLASLt's workspace, with which torch 2.15 adds a bias to a product."""
_HALF = frozenset({torch.float16, torch.bfloat16})


def product_workspace_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], n_bytes: int) -> int:
    """Return the bytes that torch 2.15 allocates while it computes a product; `n_bytes` is cuBLAS's own workspace.

    Where a bias is added, cuBLASLt computes the product, whose workspace is smaller. Measured over stubs with torch
    2.15.0: it takes neither a scaled product nor one with a dimension of 1.
    """
    if operator_schema(func).name != "aten::addmm" or set(kwargs.values()) - {1}:
        return n_bytes
    bias, left, right = args[:3]
    if left.shape[1] < 2 or right.shape[1] < 2:  # noqa: PLR2004, rows and columns
        return n_bytes
    is_vector = bias.dim() == 1 and bias.shape[0] == right.shape[1]
    is_served = is_vector or (bias.dim() > 1 and (bias.dtype in _HALF or left.shape[0] == 1))
    return LT_WORKSPACE if is_served and bias.is_contiguous() else n_bytes


@cache
def _from_sizes() -> frozenset[Any]:
    """Return the operators whose first argument is the list of sizes, and whose data type no other argument changes."""
    aten = torch.ops.aten
    return frozenset({
        aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default,
        aten.rand.default, aten.randn.default,
    })  # fmt: skip


def bytes_to_make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of the tensor that an operator makes from its sizes alone; 0 for any other operator."""
    if not args or func not in _from_sizes() or kwargs.get("layout") not in {None, torch.strided}:
        return 0
    if str(kwargs.get("device") or "cpu") != "cpu" or not all(isinstance(size, int) for size in args[0]):
        return 0
    dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
    n_bytes: int = math.prod(args[0]) * dtype.itemsize
    return n_bytes


def compose(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of `OperatorKind.COMPOSED` as the operators that it consists of."""
    return run_composite(func, args, kwargs)


def _is_composed(func: OpOverload) -> bool:
    # Under inference_mode these operators are not split before they get here, and the schemas of reshape, contiguous
    # and `to` promise aliases that they do not return. Only kernels in C++ count: the Python decompositions that
    # `func.decompose` prefers round differently.
    schema = operator_schema(func)
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def _may_hold_tensors(kind: torch.JitType) -> bool:
    return "Tensor" in str(kind) or "Any" in str(kind)


_ADD = torch.ops.aten.add.Tensor


def is_gradient_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether this operator is autograd's sum of two gradients, of which only autograd holds the first.

    A formula of backward that adds to a tensor which only it holds looks the same, and counts as such a sum. Where
    torch's reference counts are not available it is False, and each sum takes a new tensor.
    """
    if func is not _ADD or kwargs or current_graph_task() == -1 or not CAN_COUNT_REFERENCES:
        return False
    return not torch.is_grad_enabled() and _fits(*args) and _references(args) == references_of_autograd()


def _fits(total: Any, gradient: Any) -> bool:
    return (
        isinstance(total, torch.Tensor)
        and isinstance(gradient, torch.Tensor)
        and total.shape == gradient.shape
        and total.dtype is gradient.dtype
        and total.layout is gradient.layout is torch.strided
        and _is_dense(total)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie side by side, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _references(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Return the number of references to the first argument: those in C++, those to its storage, those in Python."""
    return *reference_counts(args[0]), sys.getrefcount(args[0])


@cache
def references_of_autograd() -> tuple[int, int, int]:
    """Return `_references` of a gradient that only autograd holds; versions of torch differ in it.

    The result comes from a small backward. So the first call must come before any operator is handled, because autograd
    is off then.
    """
    if not CAN_COUNT_REFERENCES:
        return 0, 0, 0
    probe = _Probe()  # type: ignore[no-untyped-call]
    with without_dispatch_modes(), torch.inference_mode(mode=False), torch.enable_grad(), probe:
        x = torch.ones(1, requires_grad=True, device="cpu")
        twice = x * 2
        (twice.sin() * twice.cos()).backward()  # type: ignore[no-untyped-call]
    return probe.seen


class _Probe(OperatorMode):  # type: ignore[no-untyped-call]
    seen = (0, 0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and current_graph_task() != -1:
            self.seen = _references(args)
        return func(*args, **(kwargs or {}))
