"""CUDA's lists of operators for autocast, on tensors that stand for CUDA's but are on the CPU."""

# ruff: noqa: SLF001, torch has no public way to add kernels to a dispatch key for a while

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# AT_FORALL_FP32 of ATen/autocast_mode.h (torch 2.13), without the operators that are on the CPU's list already:
# computed in float32.
_IN_FLOAT = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]
# AT_FORALL_FP32_SET_OPT_DTYPE: float32 results, from inputs as they are, unless the caller says a dtype.
_TO_FLOAT = ["prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"]
_LINALG_NORMS = ("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord")
_HALF = frozenset({torch.float16, torch.bfloat16})


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """While entered, autocast on CPU tensors keeps to CUDA's lists, and a user's autocast("cuda") acts on them.

    What the CPU computes in float32 and CUDA does not (avg_pool3d, binary_cross_entropy and a few more) stays.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    original = torch.autocast.__init__
    try:
        for name in _IN_FLOAT:
            _register(library, name, _in_float)
        for name in (*_TO_FLOAT, *_LINALG_NORMS):
            _register(library, name, _to_float)
        torch.autocast.__init__ = _for_cpu(original)  # type: ignore[method-assign]
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
        library._destroy()


def _register(library: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if operator is None:  # not in this version of torch
        return
    qualified = f"aten::{name}"
    if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "AutocastCPU"):
        return
    library.impl(name, make(operator), "AutocastCPU")


def _in_float(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*_floats(args), **{name: _float(value) for name, value in kwargs.items()})

    return run


def _to_float(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if isinstance(args[0], torch.Tensor) and args[0].dtype in _HALF and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            return operator(*args, **kwargs)

    return run


def _floats(values: Any) -> list[Any]:
    return [_float(value) for value in values]


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _for_cpu(original: Any) -> Any:
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807, it replaces that
        if device_type == "cuda":
            device_type = "cpu"
            if not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.get_autocast_dtype("cuda")
        original(self, device_type, *args, **kwargs)

    return __init__


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
