"""Attention for which CUDA has a fused kernel: its memory is that kernel's, and its numbers are the CPU's.

The CPU's own fused kernel has no dropout, and lays its result out as the query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_memtools._torch import FakeTensor, is_functorch_active, without_saved_tensors_hooks
from lightning_memtools.memory.cuda_ops.attention import attention, cast_by_autocast
from lightning_memtools.memory.cuda_ops.attention_kernels import (
    ATTENTION_OF_CPU,
    ATTENTION_OF_CPU_BACKWARD,
    attention_backend,
    efficient_mask,
)
from lightning_memtools.memory.virtual.patches import Patches

if TYPE_CHECKING:
    from lightning_memtools.memory.virtual.accounting_mode import AccountingMode

_PLAIN = {Tensor, torch.nn.Parameter, FakeTensor}


def fuse_attention(patches: Patches, find: Callable[[], AccountingMode | None]) -> None:
    """Replace attention by one that takes the memory of CUDA's fused kernels, where one would run.

    Fake tensors have no numbers: they go through CUDA's operators.
    """

    def make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fused(  # noqa: PLR0917, the arguments are those of torch
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            mode = find()
            tensors = query, key, value
            options: dict[str, Any] = {
                "dropout_p": dropout_p,
                "is_causal": is_causal,
                "scale": scale,
                "enable_gqa": enable_gqa,
            }
            # torch.func would need a rule of its own for each of its transforms.
            is_plain = not is_functorch_active() and _PLAIN.issuperset(map(type, tensors))
            # A mask that has a gradient would need the gradient's memory too.
            learns_mask = attn_mask is not None and attn_mask.requires_grad
            if mode is None or mode.silent or learns_mask or not (is_plain and all(one.is_cpu for one in tensors)):
                return original(query, key, value, attn_mask=attn_mask, **options)
            query, key, value, attn_mask = cast_by_autocast(query, key, value, attn_mask)
            backend = attention_backend(
                query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa, gpu=mode.gpu
            )
            if isinstance(query, FakeTensor):
                return attention(query, key, value, attn_mask, **options, gpu=mode.gpu)
            if backend == "math":
                return original(query, key, value, attn_mask=attn_mask, **options)
            mask = efficient_mask(query, key, attn_mask)
            out: Tensor = FusedAttention.apply(mode, original, options, query, key, value, mask)  # type: ignore[no-untyped-call]
            return out

        return fused

    patches.replace(F, "scaled_dot_product_attention", make)


class FusedAttention(torch.autograd.Function):
    """Attention whose unfused parts, computed on the host, do not count; what a fused kernel of CUDA takes does."""

    @staticmethod
    def forward(
        ctx: Any, mode: AccountingMode, original: Callable[..., Tensor], options: dict[str, Any], *inputs: Tensor | None
    ) -> Tensor:
        """Compute the attention, and keep the graph of its parts as host memory."""
        query, key, value, mask = inputs
        assert query is not None
        learns = any(ctx.needs_input_grad)

        def compute() -> tuple[Tensor, Tensor]:
            # Not the hooks of the program (a checkpoint's, say): they are for what a kernel saves.
            with torch.set_grad_enabled(learns), without_saved_tensors_hooks():
                # Copies: the graph of the parts lives longer than what a kernel keeps, which would stay on the device.
                ctx.leaves = [
                    one.detach().clone().requires_grad_(learns) for one in (query, key, value) if one is not None
                ]
                ctx.graph = original(*ctx.leaves, attn_mask=None if mask is None else mask.clone(), **options)
            # A copy also where it is laid out already as a kernel does: the graph lives longer than the result.
            return ctx.graph.detach().clone(), torch.zeros(query.shape[:3])

        ctx.mode, ctx.scale = mode, options["scale"]
        ctx.rest = options["dropout_p"], options["is_causal"]
        with torch.set_grad_enabled(learns):  # the sums of rows are for backward only
            out, sums = mode.stand_in(
                ATTENTION_OF_CPU, compute, (query, key, value, *ctx.rest), {"attn_mask": mask, "scale": ctx.scale}
            )
        ctx.save_for_backward(query, key, value, out, sums, mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Compute the gradients of query, key and value."""

        def compute() -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = torch.autograd.grad(ctx.graph, ctx.leaves, gradient, retain_graph=True)
            return found

        *saved, mask = ctx.saved_tensors
        found = ctx.mode.stand_in(
            ATTENTION_OF_CPU_BACKWARD, compute, (gradient, *saved, *ctx.rest), {"attn_mask": mask, "scale": ctx.scale}
        )
        return (None, None, None, *found, None)
