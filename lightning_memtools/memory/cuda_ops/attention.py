"""Attention as on CUDA: the kernel that scaled_dot_product_attention takes, and the memory of its fused kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lightning_memtools._torch import without_autocast_on_cpu
from lightning_memtools.memory.allocator.block_rounding import round_up
from lightning_memtools.memory.cuda_ops.autocast import cast
from lightning_memtools.memory.cuda_ops.rules import HALF, Call, Rule, copy_bytes, nbytes
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
_FLASH_MAX_HEAD = 256
_AMPERE, _VOLTA = (8, 0), (7, 0)
_NARROW, _WIDE = 64, 128  # heads for which kernels differ


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
    """Compute scaled_dot_product_attention with the kernel that torch would choose on this GPU."""
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
    """Return the kernel that scaled_dot_product_attention uses on CUDA: "flash", "efficient" or "math".

    The kernels are tried in this order, under the same conditions as in torch's transformers/cuda/sdp_utils.cpp.
    Kernels that the user has switched off in torch.backends.cuda are skipped. On Hopper, newer versions of torch
    prefer cuDNN's kernel, which takes as much memory as "flash".
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
    """Convert the mask for the memory-efficient kernel: to the query's dtype, with aligned rows, for all heads."""
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
    """Convert a boolean attention mask to an additive mask of 0 and -inf; return other masks unchanged."""
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
    """Compute attention as CUDA's "math" kernel does: in float32, unless the user allowed half-precision reductions.

    torch's own CPU implementation is not used: its dropout is not CUDA's, and it does not add fake masks in place.
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


# --- the memory of the fused kernels, flash and efficient (transformers/cuda/)


def flash(call: Call) -> Any:
    """Allocate what the flash kernel allocates: output, log-sum-exp and dropout's random state, in that order.

    For small inputs, such as one sample of 512 tokens and 12 heads, the kernel splits the keys among thread blocks.
    The partial sums of these blocks, which take a few MB in the forward pass, are not counted.
    """
    results = list(call.func(*call.args, **call.kwargs))  # on the host: for the sizes and strides
    for at in (0, 1, 6, 7):
        like, empty = results[at], aten.empty_strided.default
        results[at] = call.run(empty, like.shape, like.stride(), dtype=like.dtype, device=torch.device("cpu"))
    call.hold(16 if call.argument(3, "dropout_p", 0.0) else 0)
    return tuple(results)


def flash_backward(call: Call) -> Any:
    """Run the backward of flash attention, and allocate its temporaries, such as the query's gradient in float32.

    The output and its gradient are copied unless they are dense in the order (batch, length, heads, head size).
    """
    gradient, query, key, _, out = call.args[:5]
    batch, heads, length, head = query.shape
    call.hold(*(copy_bytes(one.transpose(1, 2)) for one in (gradient, out)))
    results = call.results()
    rows = 4 * batch * heads * round_up(length, 128)
    call.hold(rows, rows * round_up(head, 32 if head <= _WIDE else 64))  # head_size_rounded
    if key.shape[1] != heads:  # grouped queries: gradients of key and value are made per query head first
        call.hold(*[batch * key.shape[2] * heads * head * query.element_size()] * 2)
    return results


def efficient(call: Call) -> Any:
    """Allocate the kernel's output and log-sum-exp, and float32 sums for half-precision heads wider than 128."""
    query, _, value, _, wants_sums = call.args[:5]
    batch, heads, length, _ = query.shape
    out = call.empty([batch, length, heads, value.shape[-1]], query.dtype).transpose(1, 2)
    sums = call.empty([batch, heads, round_up(length, 32) if wants_sums else 0], torch.float32)
    seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))
    call.hold(4 * out.numel() if query.dtype in HALF and value.shape[-1] > _WIDE else 0)
    return out, sums, seed, offset


def efficient_backward(call: Call) -> Any:
    """Run the backward of memory-efficient attention, and allocate the temporary memory of its CUDA kernel.

    The sizes are those in torch's attention_backward.cu and kernel_backward.h.
    """
    gradient, query, key, value, _, out = call.args[:6]
    batch, heads, length, _ = query.shape
    sums, is_half = 4 * batch * heads * length, query.dtype in HALF
    # The products of gradient and output, and their sums before these lie by heads.
    passing = () if is_half else (nbytes(out), 0 if heads == 1 or length == 1 else sums)
    call.hold(copy_bytes(gradient.transpose(1, 2)))
    results = call.results()
    call.hold(*passing, sums)
    call.release(*passing)
    call.hold(4 * batch * heads * _gradient_sums(batch * heads, query, key, value, is_half=is_half))
    return results


def _gradient_sums(n_heads: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_half: bool) -> int:
    """Return how many floats per head the memory-efficient kernel needs as a buffer for summing gradients."""
    head = query.shape[-1]
    rows = 128 if is_half and head > _WIDE else 64
    tiles = -(-query.shape[2] // rows) * -(-head // 64)
    floats = tiles * (rows * 64 + 4)
    if is_half and head > _NARROW:
        splits = -(-key.shape[2] // 64)
        if n_heads >= 256 and splits <= 2:  # noqa: PLR2004, there are enough blocks without
            splits = 1
        splits = max(1, min(splits, 200 // n_heads))
        floats += splits * 64 * sum(round_up(one.shape[-1], rows) for one in (query, value))
    return floats


FUSED_ATTENTION: dict[Any, Rule] = {
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
