"""Where gradients of one tensor meet in backward: summed in place, as autograd does when no mode watches.

Autograd adds a gradient to one that has come before in place, if nobody else refers to that one. But it tells neither
under a dispatch mode nor of a fake tensor whether this is so, and makes a new tensor then: in a network with residual
connections one more of the size of an activation, while both others live. The condition is that of
``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ADD = torch.ops.aten.add.Tensor
# Without these counts, which are private in torch, sums take a new tensor each.
_CAN_TELL = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def is_gradient_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether this operator is autograd's sum of two gradients, and the first one is held by autograd alone.

    A formula of backward that adds to a tensor which it alone holds looks the same, and is taken for it.
    """
    if func is not _ADD or kwargs or torch._C._current_graph_task_id() == -1 or not _CAN_TELL:
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
    """Whether its elements lie side by side, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _references(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """How many refer to the first argument: in C++, to its storage, and in Python."""
    storage = args[0].untyped_storage()
    return args[0]._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(args[0])


@cache
def references_of_autograd() -> tuple[int, int, int]:
    """What `_references` is for a gradient held by autograd alone; versions of torch differ in it.

    Found by a small backward, so it has to be called before any operator is handled, where autograd is off.
    """
    if not _CAN_TELL:
        return 0, 0, 0
    probe = _Probe()  # type: ignore[no-untyped-call]
    with _disable_current_modes(), torch.inference_mode(mode=False), torch.enable_grad(), probe:
        x = torch.ones(1, requires_grad=True, device="cpu")
        twice = x * 2
        (twice.sin() * twice.cos()).backward()  # type: ignore[no-untyped-call]
    return probe.seen


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    seen = (0, 0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in AccountingMode; and otherwise torch would load its compiler for this.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.seen = _references(args)
        return func(*args, **(kwargs or {}))
