"""scaled_dot_product_attention on fake tensors, by the operators that CUDA takes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lightning_memtools.memory.cuda_ops.attention_kernels import attention_backend, efficient_mask
from lightning_memtools.memory.cuda_ops.autocast import cast

aten = torch.ops.aten


def attention(  # noqa: PLR0917, the arguments are those of torch
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention with the kernel that CUDA takes."""
    query, key, value, attn_mask = cast_by_autocast(query, key, value, attn_mask)
    backend = attention_backend(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    if backend == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend == "efficient":
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if dropout_p:
        return _unfused_with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale)
    out: torch.Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def cast_by_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return attention's inputs in autocast's lower precision if autocast is on."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    return tuple(cast(one, torch.get_autocast_dtype("cpu")) for one in tensors)


def _unfused_with_dropout(  # noqa: PLR0917, as torch's
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Compute _scaled_dot_product_attention_math (attention.cpp), whose own dropout would be the CPU's."""
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    query = query * root
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype is torch.bool:
        kept, left_out = (torch.scalar_tensor(one, dtype=query.dtype) for one in (0.0, -torch.inf))
        mask = torch.where(mask, kept, left_out)
        del kept, left_out
    if key.shape[-3] != query.shape[-3]:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scores = query @ (key.mT * root)
    if mask is not None:
        scores += mask
    scores = aten._safe_softmax(scores, -1)
    scores = torch.native_dropout(scores, dropout_p, train=True)[0]
    return scores @ value


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
