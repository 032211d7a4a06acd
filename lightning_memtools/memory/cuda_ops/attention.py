"""Attention as on CUDA: which kernel scaled_dot_product_attention takes, and the operators that it calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lightning_memtools._torch import without_autocast_on_cpu
from lightning_memtools.memory.cuda_ops.autocast import cast
from lightning_memtools.memory.cuda_ops.rules import HALF
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
_FLASH_MAX_HEAD = 256
_AMPERE, _VOLTA = (8, 0), (7, 0)


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
    """Compute scaled_dot_product_attention with the kernel that torch chooses on this GPU."""
    inputs = query, key, value, attn_mask
    if torch.is_autocast_enabled("cpu"):
        # As the compiled code evaluates a call's arguments: the last first.
        inputs = tuple(cast(one, torch.get_autocast_dtype("cpu")) for one in inputs[::-1])[::-1]
    query, key, value, mask = inputs
    backend = attention_backend(query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa, gpu=gpu)
    if backend == "math":
        return _unfused(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    head = query.shape[-1]
    if backend == "flash":
        if padding := -head % 8:
            query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
            scale = head**-0.5 if scale is None else scale
        flash = aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :head] if padding else out
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    mask = _efficient_mask(query, key, mask)
    efficient = aten._scaled_dot_product_efficient_attention
    results = efficient(query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale)
    return results[0]  # type: ignore[no-any-return]


def attention_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
    gpu: GpuShape,
) -> str:
    """Return the kernel that scaled_dot_product_attention takes on CUDA: "flash", "efficient" or "math".

    The conditions are those of use_flash_attention and use_mem_efficient_attention in
    transformers/cuda/sdp_utils.cpp, in their order of priority; kernels that the user has switched off in
    torch.backends.cuda are left out. cuDNN's kernel, which newer versions prefer on Hopper, takes as much memory as
    "flash".
    """
    tensors = query, key, value
    if any(tensor.dim() != 4 for tensor in tensors):  # noqa: PLR2004, batch, heads, length, head
        return "math"
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    same_batch = query.shape[0] == key.shape[0] == value.shape[0]
    last_is_dense = all(tensor.stride(-1) == 1 for tensor in tensors)
    # For causal attention of different lengths, torch aligns the mask at another corner than flash does.
    square = not is_causal or query.shape[2] == key.shape[2]
    if (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and gpu.compute_capability >= _AMPERE
        and mask is None
        and query.dtype in HALF
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _FLASH_MAX_HEAD
        and same_batch
        and (same_heads or enable_gqa)
        and square
        and last_is_dense
    ):
        return "flash"
    is_ampere, is_volta = gpu.compute_capability >= _AMPERE, gpu.compute_capability >= _VOLTA
    # minimum_gemm_alignment: what tensor cores take.
    aligned = (8 if is_volta else 1) if query.dtype in HALF else 4 if is_ampere else 1
    if (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and query.dtype in ({*HALF, torch.float32} if is_ampere else {torch.float16, torch.float32})
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % aligned == 0
        and value.shape[-1] % aligned == 0
        and same_batch
        and same_heads
        and last_is_dense
    ):
        return "efficient"
    return "math"


def _efficient_mask(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask that the efficient kernel takes: of the query's type, aligned, and one for each head."""
    if mask is None:
        return None
    mask = _of_numbers(mask, query.dtype)
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        # The kernel copies the mask into rows whose length is a multiple of 8, and uses a part of them (pad_bias,
        # which adds 8 elements even where none is missing).
        length = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _of_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask of bools as a mask of 0 and -inf (convert_boolean_attn_mask); other masks unchanged."""
    if mask.dtype is not torch.bool:
        return mask
    kept, left_out = (torch.scalar_tensor(one, dtype=dtype) for one in (0.0, -torch.inf))
    return torch.where(mask, kept, left_out)


def _unfused(  # noqa: PLR0917, as torch's
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

    torch's own function uses the CPU's dropout, and does not add a mask in place to fake tensors.
    """
    dtype, allowed = query.dtype, torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    mask = None if mask is None else _of_numbers(mask, dtype)
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
