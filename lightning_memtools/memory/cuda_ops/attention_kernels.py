"""The memory of attention's fused kernels, flash and efficient (transformers/cuda/)."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memtools.memory.allocator.block_rounding import round_up
from lightning_memtools.memory.cuda_ops.rules import HALF, Call, Rule, copy_bytes, nbytes

aten = torch.ops.aten
_NARROW, _WIDE = 64, 128  # heads for which kernels differ


def flash(call: Call) -> Any:
    """Allocate output, log-sum-exp and the state of dropout, in that order (mha_fwd of flash_api.cpp).

    For small inputs (one sample of 512 tokens in 12 heads) the kernel also splits the keys over more blocks. Their
    sums, some MB in the forward pass, are left out.
    """
    results = list(call.func(*call.args, **call.kwargs))  # on the host: for the sizes and strides
    for at in (0, 1, 6, 7):
        like, empty = results[at], aten.empty_strided.default
        results[at] = call.run(empty, like.shape, like.stride(), dtype=like.dtype, device=torch.device("cpu"))
    call.hold(16 if call.argument(3, "dropout_p", 0.0) else 0)
    return tuple(results)


def flash_backward(call: Call) -> Any:
    """Hold the query's gradient in float32, with length and head rounded up (mha_bwd of flash_api.cpp).

    Gradient and output are copied unless their memory is in the order batch, length, heads, head.
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
    """Return output, log-sum-exp and dropout's state on the host; sum halves in float32 if heads are above 128."""
    query, _, value, _, wants_sums = call.args[:5]
    batch, heads, length, _ = query.shape
    out = call.empty([batch, length, heads, value.shape[-1]], query.dtype).transpose(1, 2)
    sums = call.empty([batch, heads, round_up(length, 32) if wants_sums else 0], torch.float32)
    seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))
    call.hold(4 * out.numel() if query.dtype in HALF and value.shape[-1] > _WIDE else 0)
    return out, sums, seed, offset


def efficient_backward(call: Call) -> Any:
    """Hold the products of gradient and output, and then the gradients' float32 sums.

    Source: attention_backward.cu and kernel_backward.h.
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
    """Return the number of floats of a head's workspace: tiles of the query's gradient; for wide halves, of all."""
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
