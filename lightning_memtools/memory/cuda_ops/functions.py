"""Functions of torch that act differently on a CUDA device: attention, norms, recurrent layers and moves to the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lightning_memtools._torch import ENGINE_RUN, kept_in_backward, without_autocast_on_cpu
from lightning_memtools.memory.cuda_ops.attention import attention
from lightning_memtools.memory.cuda_ops.recurrent import RECURRENT
from lightning_memtools.memory.sizes import GpuShape
from lightning_memtools.memory.virtual.patches import Patches


class ReplacedFunctions(TorchFunctionMode):
    """Mode that replaces some of torch's functions, even while gradient checkpointing recomputes layers in backward.

    Within it, `.cuda()`, `.to("cuda")` and `device="cuda"` return CPU tensors. In an estimate, CPU tensors stand for
    CUDA tensors, and torch may have been built without CUDA.

    Args:
        replacements: The replacement of each function.
    """

    def __init__(self, replacements: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._replacements = replacements
        self._patches = Patches()

    def __enter__(self) -> Self:
        """Enter the mode, and also patch F.scaled_dot_product_attention.

        The patch is for calls inside torch's own functions, which the mode does not see: nn.MultiheadAttention
        calls attention in this way.
        """
        self._patches.replace(*ENGINE_RUN, kept_in_backward(self))
        attend = self._replacements.get(F.scaled_dot_product_attention)
        if attend is not None:
            # `Patches` gives the replacement the original's name, so it has to be an object of its own.
            self._patches.replace(F, "scaled_dot_product_attention", lambda _: partial(attend))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the mode, and undo the patches that `__enter__` made."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.undo()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function or its replacement, with "cpu" in place of any CUDA device."""
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is not torch.device and (any(map(_names_cuda, args)) or _names_cuda(kwargs.get("device"))):
            args = tuple("cpu" if _names_cuda(one) else one for one in args)
            kwargs = {name: "cpu" if _names_cuda(value) else value for name, value in kwargs.items()}
        return self._replacements.get(func, func)(*args, **kwargs)


def _names_cuda(thing: Any) -> bool:
    kind = type(thing)
    return (kind is torch.device and thing.type == "cuda") or (kind is str and thing[:4] == "cuda")


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates the memory of CUDA's fused rms_norm. It computes no values, so it works for fake tensors only."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor | None, n_normalized: int) -> torch.Tensor:
        """Allocate the result, and one float32 value per row for the reciprocal root mean square."""
        out = torch.empty_like(source.contiguous())
        rstd = source.new_empty(source.shape[: source.dim() - n_normalized], dtype=torch.float32)
        ctx.save_for_backward(source, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        """Allocate the gradients of the input and the weight."""
        source, weight, _ = ctx.saved_tensors
        return torch.empty_like(source.contiguous()), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    source: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """Run rms_norm as CUDA does: as one fused kernel, unless input and weight differ in dtype."""
    if torch.is_autocast_enabled("cpu"):  # on CUDA's list for float32
        source, weight = source.float(), None if weight is None else weight.float()
    if weight is not None and weight.dtype is not source.dtype:
        with without_autocast_on_cpu():
            return torch.rms_norm(source, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(source, weight, len(normalized_shape))  # type: ignore[no-untyped-call]


def cuda_functions(gpu: GpuShape) -> dict[Any, Callable[..., Any]]:
    """Return replacements for torch's attention, rms_norm and RNN functions, to allocate memory as on a given GPU."""
    attend = partial(attention, gpu=gpu)
    return {F.scaled_dot_product_attention: attend, F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm, **RECURRENT}
