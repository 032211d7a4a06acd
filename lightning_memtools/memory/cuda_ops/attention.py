"""Attention on fake tensors: scaled_dot_product_attention calls the operators that it calls on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lightning_memtools._torch import ATTENTION_ADDS_BATCH, without_autocast_on_cpu
from lightning_memtools.memory.cuda_ops.attention_kernels import attention_backend, efficient_mask
from lightning_memtools.memory.cuda_ops.autocast import cast
from lightning_memtools.memory.cuda_ops.kernels import HALF
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
_WITHOUT_BATCH = 3  # dimensions: heads, length, head


def attention(  # noqa: PLR0917, the arguments are those of torch
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    gpu: GpuShape,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention with the kernel that CUDA takes on a GPU."""
    query, key, value, attn_mask = cast_by_autocast(query, key, value, attn_mask)
    adds_batch = ATTENTION_ADDS_BATCH and {query.dim(), key.dim(), value.dim()} == {_WITHOUT_BATCH}
    if adds_batch:
        query, key, value = (one.unsqueeze(0) for one in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == _WITHOUT_BATCH:
            attn_mask = attn_mask.unsqueeze(0)
    backend = attention_backend(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa, gpu=gpu)
    if backend == "flash":
        out = _flash(query, key, value, dropout_p, is_causal, scale)
    elif backend == "efficient":
        out = _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    else:
        out = unfused(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.squeeze(0) if adds_batch else out


def cast_by_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return attention's inputs in autocast's lower precision if autocast is on."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    # As the compiled code evaluates a call's arguments: the last first.
    return tuple(cast(one, torch.get_autocast_dtype("cpu")) for one in tensors[::-1])[::-1]


def unfused(  # noqa: PLR0917, as torch's
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute _scaled_dot_product_attention_math (attention.cpp), halves in float32 unless the user allows otherwise.

    torch's own has the CPU's dropout, and does not add a mask in place to fake tensors.
    """
    dtype, allowed = query.dtype, torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    mask = _of_numbers(mask, dtype)
    # Autocast takes attention as one operator, and leaves its parts alone.
    with without_autocast_on_cpu():
        inputs = query, key, value  # until the end, as in torch
        if dtype in HALF and not allowed:
            query, key, value = inputs = query.float(), key.float(), value.float()
        root = abs(query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        query = query * (-root if scale is not None and scale < 0 else root)
        if is_causal:
            mask = _of_numbers(torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(), query.dtype)
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
        scores = query @ (key.mT * root)
        if mask is not None:
            scores += mask
        scores = aten._safe_softmax(scores, -1)
        if dropout_p:
            scores = torch.native_dropout(scores, dropout_p, train=True)[0]
        returned = scores.to(dtype)  # torch returns the scores too, and casts them first
        out: torch.Tensor = (scores @ value).to(dtype)
        del inputs, returned
        return out


def _of_numbers(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask of bools as one of 0 and -inf (convert_boolean_attn_mask)."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    kept, left_out = (torch.scalar_tensor(one, dtype=dtype) for one in (0.0, -torch.inf))
    return torch.where(mask, kept, left_out)


def _flash(  # noqa: PLR0917, as torch's
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    head = query.shape[-1]
    padding = -head % 8
    if padding:
        query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
        scale = head**-0.5 if scale is None else scale
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
        0
    ]
    return out[..., :head] if padding else out


def _efficient(  # noqa: PLR0917, as torch's
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    mask = efficient_mask(query, key, mask)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]
    return out
