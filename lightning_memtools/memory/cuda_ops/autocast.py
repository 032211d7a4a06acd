"""CUDA's lists of operators for autocast, applied to CPU tensors that stand for CUDA tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from lightning_memtools._torch import (
    INTERPOLATIONS_IN_FLOAT,
    FakeTensor,
    has_kernel,
    operator_names,
    remove_kernels,
    without_autocast_on_cpu,
)

# AT_FORALL_FP32 of ATen/autocast_mode.h (torch 2.13), computed in float32. The CPU's list has some of them already.
_IN_FLOAT = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", *INTERPOLATIONS_IN_FLOAT,
]  # fmt: skip
# AT_FORALL_FP32_SET_OPT_DTYPE: float32 results, from inputs as they are, unless the caller says a dtype.
_TO_FLOAT = ["prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"]
# Operators of AT_FORALL_LOWER_PRECISION_FP that are not on the CPU's list, nor are the operators they consist of.
_IN_HALF = ["mv", "addmv", "addr"]
# AT_FORALL_PROMOTE: in the widest type among the inputs.
_PROMOTED = ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
             "tensordot", "vdot"]  # fmt: skip
# These are on the CPU's list for the lower precision; the operators they consist of are on CUDA's list. And the CPU has
# no kernel for avg_pool3d in lower precision.
_SAME = frozenset({
    "aten::_addmm_activation", "aten::_native_multi_head_attention", "aten::mkldnn_rnn_layer", "aten::avg_pool3d",
    "aten::conv1d.padding", "aten::conv2d.padding", "aten::conv3d.padding",
})  # fmt: skip
_LINALG_NORMS = ("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord")
_HALF = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALF | {torch.float32}
_KEY = "AutocastCPU"


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Context manager: make autocast treat CPU tensors as if they were CUDA tensors.

    autocast("cuda") then acts on CPU tensors, and uses CUDA's lists of operators instead of the CPU's.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    original = torch.autocast.__init__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns where a kernel of its own is replaced
            _register_all(library)
        torch.autocast.__init__ = _for_cpu(original)  # type: ignore[method-assign]
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
        remove_kernels(library)


def _register_all(library: Any) -> None:
    for name in _only_on_cpu():
        library.impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel, _KEY)
    for names, make in (
        (_IN_FLOAT, _in_float),
        ((*_TO_FLOAT, *_LINALG_NORMS), _to_float),
        (_IN_HALF, partial(_cast_to, choose=lambda _tensors: torch.get_autocast_dtype("cpu"))),
        (_PROMOTED, partial(_cast_to, choose=_widest)),
    ):
        for name in names:
            _register(library, name, make)


@cache
def _only_on_cpu() -> tuple[str, ...]:
    # Builds of torch without CUDA hold its lists too.
    names = [name for name in operator_names() if name.startswith("aten::")]
    return tuple(n for n in names if has_kernel(n, _KEY) and not has_kernel(n, "AutocastCUDA") and n not in _SAME)


def _register(library: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if operator is None or not has_kernel(f"aten::{name}", "AutocastCUDA"):  # not (listed) in this version of torch
        return
    if has_kernel(f"aten::{name}", _KEY) and make is _in_float:  # as the CPU does
        return
    library.impl(name, make(operator), _KEY)


def _in_float(operator: Any) -> Callable[..., Any]:
    return _cast_to(operator, lambda _tensors: torch.float32)


def _cast_to(operator: Any, choose: Callable[[list[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with without_autocast_on_cpu():
            dtype = choose([one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)])
            return operator(
                *(cast(one, dtype) for one in args), **{name: cast(one, dtype) for name, one in kwargs.items()}
            )

    return run


def _to_float(operator: Any) -> Callable[..., Any]:
    fused = _FUSED.get(operator)

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_autocast_on_cpu():
            # A dtype that the caller passes decides; cross_entropy passes the type of its input.
            says_dtype = any(isinstance(one, torch.dtype) for one in (*args, kwargs.get("dtype")))
            if isinstance(args[0], torch.Tensor) and args[0].dtype in _HALF and not says_dtype:
                if len(args) > 2 and args[2] is None:  # noqa: PLR2004, the dtype, where it is given by position
                    args = args[:2]
                if fused is not None and args[0].dtype is torch.float16 and isinstance(args[0], FakeTensor):
                    return fused(args[0], args[1], True)  # noqa: FBT003, torch's half_to_float
                kwargs["dtype"] = torch.float32
            return operator(*args, **kwargs)

    return run


# From float16, and from that alone, CUDA's kernels make float32 without a copy of the input (ATen/native/SoftMax.cpp).
# The CPU's kernels refuse to, so only fake tensors go there.
_FUSED: dict[Any, Any] = {
    torch.ops.aten.softmax.int: torch.ops.aten._softmax,
    torch.ops.aten.log_softmax.int: torch.ops.aten._log_softmax,
}


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    half = torch.get_autocast_dtype("cpu")
    return torch.float32 if any(tensor.dtype is torch.float32 for tensor in tensors) else half


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a float32, float16 or bfloat16 tensor to `dtype`, as autocast does; return any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.dtype in _FLOATS:
        return value.to(dtype)
    return value


def _for_cpu(original: Any) -> Any:
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807, it replaces that
        if device_type == "cuda":
            device_type = "cpu"
            if not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.get_autocast_dtype("cuda")
        original(self, device_type, *args, **kwargs)

    return __init__
