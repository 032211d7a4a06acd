"""Names the sizes of an operator's arguments, to tell its results at other sizes.

Batch norm of (64, 256, 56, 56) and of (16, 128, 28, 28) return the same but for the sizes. So a result is stored with
names in place of sizes, and serves both, for all operators whose results have no size that an argument does not have.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lightning_memtools._torch import OpOverload, operator_schema

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""The names of a dense tensor's sizes, and its dimensions in the order of memory, the outermost first."""

# Sizes 0 and 1 stand for themselves: with them tensors are empty, or broadcast.
_LEAST_NAMED = 2
# Beside those that work element by element. All of them have sizes of their arguments, whatever these are.
_OTHERS = {
    "aten::native_batch_norm", "aten::native_batch_norm_backward", "aten::native_layer_norm",
    "aten::native_layer_norm_backward", "aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::_softmax",
    "aten::_softmax_backward_data", "aten::_safe_softmax", "aten::nll_loss_forward", "aten::nll_loss_backward",
    "aten::addmm", "aten::mm", "aten::bmm", "aten::sum", "aten::mean", "aten::embedding",
}  # fmt: skip


@cache
def has_sizes_of_arguments(func: Any) -> bool:
    """Return whether each size of an operator's results is 0, 1 or one of its arguments' sizes, and how it is laid out.

    The layout then follows from theirs and from which sizes are equal.
    """
    return isinstance(func, OpOverload) and (torch.Tag.pointwise in func.tags or operator_schema(func).name in _OTHERS)


class SizeNames:
    """The different sizes of the arguments of one call, named by negative numbers in the order in which they come."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def layout_of(self, shape: tuple[int, ...], stride: tuple[int, ...], *, is_new: bool) -> Layout | None:
        """Return a tensor's layout; None if it is not dense, or has a size that needs a new name and must not.

        Args:
            shape: The tensor's shape.
            stride: Its strides.
            is_new: Give names to sizes that have none.
        """
        order = tuple(sorted(range(len(shape)), key=lambda at: -stride[at]))
        if _dense(shape, order) != tuple(stride):
            return None
        names: list[int] = []
        for size in shape:
            if size >= _LEAST_NAMED and size not in self._sizes:
                if not is_new:
                    return None
                self._sizes.append(size)
            names.append(size if size < _LEAST_NAMED else -1 - self._sizes.index(size))
        return tuple(names), order

    def shape_and_stride(self, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape and strides of a tensor with a layout that these sizes, or others like them, name."""
        names, order = layout
        shape = tuple(name if name >= 0 else self._sizes[-1 - name] for name in names)
        return shape, _dense(shape, order)


def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    stride = [0] * len(shape)
    step = 1
    for at in reversed(order):
        stride[at] = step
        step *= max(shape[at], 1)
    return tuple(stride)
