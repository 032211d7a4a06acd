"""Functions of torch that act otherwise on a CUDA device: attention, softmax, recurrent layers and moves to the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lightning_memtools._torch import ENGINE_RUN, GROUP_NORM_KEEPS_COPY, kept_in_backward, without_autocast_on_cpu
from lightning_memtools.memory.cuda_ops.attention import attention
from lightning_memtools.memory.cuda_ops.autocast import cast
from lightning_memtools.memory.cuda_ops.losses import FusedBce
from lightning_memtools.memory.cuda_ops.normalizations import FusedRmsNorm, is_native_batch_norm
from lightning_memtools.memory.cuda_ops.recurrent import RECURRENT
from lightning_memtools.memory.memory_formats import memory_format_of
from lightning_memtools.memory.sizes import GpuShape
from lightning_memtools.memory.virtual.patches import Patches

aten = torch.ops.aten


class _ModeInBackwardToo(TorchFunctionMode):
    """A mode that is on in backward passes too, where layers run again, and that replaces functions by their names."""

    def __init__(self) -> None:
        super().__init__()
        self._patches = Patches()

    def __enter__(self) -> Self:
        """Enter the mode."""
        self._patches.replace(*ENGINE_RUN, kept_in_backward(self))
        self._replace_functions(self._patches)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the mode, and restore the functions."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.undo()

    def _replace_functions(self, patches: Patches) -> None:
        """Replace the functions that a mode cannot see."""


class CudaFunctions(_ModeInBackwardToo):
    """Runs attention with the kernel that CUDA chooses on a GPU, recurrent layers as cuDNN does."""

    def __init__(self, gpu: GpuShape) -> None:
        super().__init__()
        self._attention = partial(attention, gpu=gpu)
        self._replacements = _REPLACEMENTS | {F.scaled_dot_product_attention: self._attention}

    def _replace_functions(self, patches: Patches) -> None:
        """Replace attention by its name too, because torch hides the calls within its own functions from a mode.

        One of these functions is multi_head_attention_forward, which nn.MultiheadAttention calls.
        """
        # `Patches` gives the replacement the original's name, so it has to be an object of its own.
        patches.replace(F, "scaled_dot_product_attention", lambda _: partial(self._attention))
        patches.replace(F, "linear", lambda original: partial(linear, original))
        patches.replace(torch, "clear_autocast_cache", lambda original: partial(_clear_casts, original))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or its replacement for CUDA."""
        replacement = self._replacements.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(*args, **(kwargs or {}))


def linear(original: Any, source: Any, weight: Any, bias: Any = None) -> Any:
    """Add the bias in place where CUDA does: to the product of an input that is not contiguous (linear.cpp).

    torch does not add in place to fake tensors, which could be of a class that does not allow it.
    """
    if bias is None or source.dim() == 2 or source.is_contiguous():  # noqa: PLR2004, one kernel does both
        return original(source, weight, bias)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        bias, weight, source = (_cast_once(one, dtype) for one in (bias, weight, source))  # in this order
    with without_autocast_on_cpu():
        return torch.matmul(source, weight.t()).add_(bias)


_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def _cast_once(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor as autocast does: casts of parameters are cached until it ends (cached_cast, autocast_mode.cpp)."""
    if not (tensor.requires_grad and tensor.is_leaf and torch.is_autocast_cache_enabled()):
        return cast(tensor, dtype)  # type: ignore[no-any-return]
    if id(tensor) not in _casts:
        _casts[id(tensor)] = tensor, cast(tensor, dtype)
    return _casts[id(tensor)][1]


def _clear_casts(original: Callable[[], None]) -> None:
    _casts.clear()
    original()


def _rms_norm(
    source: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """Run rms_norm as one kernel, unless input and weight differ in type (layer_norm.cpp)."""
    if torch.is_autocast_enabled("cpu"):  # on CUDA's list for float32
        source, weight = source.float(), None if weight is None else weight.float()
    if weight is not None and weight.dtype is not source.dtype:
        with without_autocast_on_cpu():
            return torch.rms_norm(source, normalized_shape, weight, eps)
    return FusedRmsNorm.apply(source, weight, len(normalized_shape))  # type: ignore[no-untyped-call]


def _group_norm(original: Any) -> Callable[..., Any]:
    """Return a group_norm that casts as CUDA's, and whose input autograd keeps as there (group_norm.cpp)."""

    def group_norm(source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):  # on CUDA's list for float32
            source = source.float()
        return original(source.contiguous() if GROUP_NORM_KEEPS_COPY else source, *args, **kwargs)

    return group_norm


def _batch_norm(original: Any, place_of_weight: int) -> Callable[..., Any]:
    """Return a batch_norm whose input is dense before autograd keeps it, where cuDNN runs (Normalization.cpp)."""

    def batch_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002, torch's name
        weight = kwargs["weight"] if "weight" in kwargs else dict(enumerate(args)).get(place_of_weight - 1)
        if not is_native_batch_norm(input, weight):
            input = input.contiguous(memory_format=memory_format_of(input))  # noqa: A001, torch's name
        return original(input, *args, **kwargs)

    return batch_norm


def _bce_with_logits(original: Any) -> Callable[..., Any]:
    def bce(source: torch.Tensor, target: torch.Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
        is_plain = not args and all(one is None for one in kwargs.values()) and not target.requires_grad
        if not is_plain or source.shape != target.shape:
            return original(source, target, *args, reduction=reduction, **kwargs)
        if torch.is_autocast_enabled("cpu"):  # on CUDA's list for float32
            target, source = target.float(), source.float()
        return FusedBce.apply(source, target, reduction)  # type: ignore[no-untyped-call]

    return bce


def _softmax_in_float(original: Any, fused: Any) -> Callable[..., Any]:
    """Return a softmax from float16 to float32 that makes no copy of its input, as CUDA's (ATen/native/SoftMax.cpp)."""

    def softmax(source: torch.Tensor, dim: int, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype is torch.float32 and source.dtype is torch.float16 and not (args or kwargs):
            return fused(source, dim, True)  # noqa: FBT003, torch's half_to_float
        return original(source, dim, *args, dtype=dtype, **kwargs)

    return softmax


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **{one: _group_norm(one) for one in (F.group_norm, torch.group_norm)},
    **{one: _batch_norm(one, place) for one, place in ((F.batch_norm, 3), (torch.batch_norm, 1))},
    F.rms_norm: _rms_norm,
    F.binary_cross_entropy_with_logits: _bce_with_logits(F.binary_cross_entropy_with_logits),
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
