"""Functions of torch that act otherwise on a CUDA device: attention, softmax, recurrent layers and moves to the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lightning_memtools._torch import ENGINE_RUN, kept_in_backward, without_autocast_on_cpu
from lightning_memtools.memory.cuda_ops.attention import attention
from lightning_memtools.memory.cuda_ops.recurrent import RECURRENT
from lightning_memtools.memory.cuda_ops.rules import is_native_batch_norm
from lightning_memtools.memory.memory_formats import memory_format_of
from lightning_memtools.memory.sizes import GpuShape
from lightning_memtools.memory.virtual.patches import Patches

aten = torch.ops.aten


class _ModeInBackwardToo(TorchFunctionMode):
    """A mode that is on in backward passes too, where layers run again."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches()

    def __enter__(self) -> Self:
        """Enter the mode."""
        self.patches.replace(*ENGINE_RUN, kept_in_backward(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the mode, and restore the functions."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.patches.undo()


class CudaFunctions(_ModeInBackwardToo):
    """Runs attention with the kernel that CUDA chooses on a GPU, recurrent layers as cuDNN does."""

    def __init__(self, gpu: GpuShape) -> None:
        super().__init__()
        self._attention = partial(attention, gpu=gpu)
        self._replacements = _REPLACEMENTS | {F.scaled_dot_product_attention: self._attention}

    def __enter__(self) -> Self:
        """Enter the mode, and replace attention by its name too.

        torch hides the calls within its own functions from a mode, and multi_head_attention_forward, which
        nn.MultiheadAttention calls, is one of these.
        """
        # `Patches` gives the replacement the original's name, so it has to be an object of its own.
        self.patches.replace(F, "scaled_dot_product_attention", lambda _: partial(self._attention))
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or its replacement for CUDA."""
        replacement = self._replacements.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(*args, **(kwargs or {}))


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's rms_norm in one kernel, as memory. It computes no values, so it serves fake tensors only."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor | None, n_normalized: int) -> torch.Tensor:
        """Allocate the result, and 1/deviation of each row in float32."""
        out = torch.empty_like(source.contiguous())
        rstd = source.new_empty(source.shape[: source.dim() - n_normalized], dtype=torch.float32)
        ctx.save_for_backward(source, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        """Allocate the gradients."""
        source, weight, _ = ctx.saved_tensors
        return torch.empty_like(source.contiguous()), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    source: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """Run rms_norm as one kernel, unless input and weight differ in type (layer_norm.cpp)."""
    if torch.is_autocast_enabled("cpu"):  # on CUDA's list for float32
        source, weight = source.float(), None if weight is None else weight.float()
    if weight is not None and weight.dtype is not source.dtype:
        with without_autocast_on_cpu():
            return torch.rms_norm(source, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(source, weight, len(normalized_shape))  # type: ignore[no-untyped-call]


def _batch_norm(original: Any, place_of_weight: int) -> Callable[..., Any]:
    """Return a batch_norm whose input is dense before autograd keeps it, where cuDNN runs (Normalization.cpp)."""

    def batch_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002, torch's name
        weight = kwargs["weight"] if "weight" in kwargs else dict(enumerate(args)).get(place_of_weight - 1)
        if not is_native_batch_norm(input, weight):
            input = input.contiguous(memory_format=memory_format_of(input))  # noqa: A001, torch's name
        return original(input, *args, **kwargs)

    return batch_norm


def _softmax_in_float(original: Any, fused: Any) -> Callable[..., Any]:
    """Return a softmax from float16 to float32 that makes no copy of its input, as CUDA's (ATen/native/SoftMax.cpp)."""

    def softmax(source: torch.Tensor, dim: int, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype is torch.float32 and source.dtype is torch.float16 and not (args or kwargs):
            return fused(source, dim, True)  # noqa: FBT003, torch's half_to_float
        return original(source, dim, *args, dtype=dtype, **kwargs)

    return softmax


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **{one: _batch_norm(one, place) for one, place in ((F.batch_norm, 3), (torch.batch_norm, 1))},
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    **{one: _softmax_in_float(one, aten._softmax) for one in (torch.softmax, torch.Tensor.softmax)},
    **{one: _softmax_in_float(one, aten._log_softmax) for one in (torch.log_softmax, torch.Tensor.log_softmax)},
    **RECURRENT,
}


class AlreadyOnCuda(_ModeInBackwardToo):
    """Makes `.cuda()`, `.to("cuda")` and `device="cuda"` return the tensors that stand for CUDA's, while entered.

    In an estimate everything is on the device already. These tensors are on the CPU (see `autocast`), and a build of
    torch without CUDA would refuse to move them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with "cpu" in place of every CUDA device."""
        if func is torch.Tensor.cuda:
            return args[0]
        if func is not torch.device and (_names_cuda(*args) or (kwargs and _names_cuda(kwargs.get("device")))):
            args = tuple("cpu" if _names_cuda(one) else one for one in args)
            kwargs = {name: "cpu" if _names_cuda(value) else value for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _names_cuda(*things: Any) -> bool:
    return any(
        thing.type == "cuda" if isinstance(thing, torch.device) else isinstance(thing, str) and thing[:4] == "cuda"
        for thing in things
    )
