"""Recurrent layers as cuDNN runs them: all time steps in one kernel, with one reserve space for backward.

Only cuDNN knows the size of that space (cudnnGetRNNTempSpaceSizes). Here it is the size of the values that an LSTM, a
GRU or a plain layer needs for its gradients at each time step: the activated gates and the states. This was not checked
on a GPU; the null device assumes the same (null_cuda/sources/cudnn.c), so all else is checked against PyTorch's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# For an LSTM four gates, the cell and its tanh; for a GRU three gates, and the hidden part of the last one.
_KEPT_PER_UNIT = {"lstm": 6, "gru": 4, "rnn": 1}
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


class _CudnnRnn(torch.autograd.Function):
    """Allocates the memory of a recurrent layer in cuDNN. It computes no values, so it serves fake tensors only."""

    @staticmethod
    def forward(  # noqa: PLR0917, autograd gives all by position
        ctx: Any,
        kind: str,
        layout: tuple[int, int, bool, bool],
        dropout: float,
        train: bool,
        n_biases: int,
        source: torch.Tensor,
        hx: torch.Tensor,
        cx: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> Any:
        hidden, n_layers, both_ways, batch_first = layout
        directions = 2 if both_ways else 1
        n_out = hx.shape[-1] * directions
        in_time_order = torch.empty_like(source) if batch_first else None
        out = source.new_empty((*source.shape[:-1], n_out))
        n_places = source.numel() // source.shape[-1]
        states = [torch.empty_like(hx), *([] if cx is None else [torch.empty_like(cx)])]
        # torch.backends.cudnn.is_acceptable knows no bfloat16, so its weights are not flattened once for all.
        n_flat = n_biases + sum(weight.numel() for weight in weights)
        flat = source.new_empty(n_flat) if source.dtype is torch.bfloat16 else None
        if train:
            kept = _KEPT_PER_UNIT[kind] * hidden * directions * n_layers
            between = n_out * (n_layers - 1) * (2 if dropout else 1)
            reserve = source.new_empty(n_places * (kept + between))
            ctx.save_for_backward(source, hx, *([] if cx is None else [cx]), *weights, out, reserve)
            ctx.flat = flat
            ctx.shapes = (source, hx, cx)
        ctx.n_weights, ctx.n_flat = len(weights), n_flat
        ctx.batch_first = batch_first
        del in_time_order
        return out, *states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        source, hx, cx = ctx.shapes
        weights = saved[len(saved) - 2 - ctx.n_weights : -2]
        # Time steps come first in cuDNN: without batch_first, input and gradient lie so already.
        in_time_order = [torch.empty_like(one) for one in (source, gradients[0])] if ctx.batch_first else []
        # cuDNN computes these gradients on its way to those of the weights, wanted or not.
        of_source, of_hx = torch.empty_like(source), torch.empty_like(hx)
        of_cx = None if cx is None else torch.empty_like(cx)
        del in_time_order
        in_time_order = [torch.empty_like(source)] if ctx.batch_first else []
        # It writes the gradients of all weights into one tensor, of which they are views.
        flat = source.new_empty(ctx.n_flat)
        del in_time_order
        parts, offset = [], 0
        for weight in weights:
            parts.append(flat[offset : offset + weight.numel()].view(weight.shape))
            offset += weight.numel()
        return (
            *[None] * 5,
            of_source if ctx.needs_input_grad[5] else None,
            of_hx if ctx.needs_input_grad[6] else None,
            of_cx if ctx.needs_input_grad[7] else None,
            *parts,
        )


def _lstm(source: torch.Tensor, *args: Any) -> Any:
    hx, *rest = _without_batch_sizes(args)
    return _run("lstm", source, hx[0], hx[1], *rest)


def _other(kind: str) -> Callable[..., Any]:
    def run(source: torch.Tensor, *args: Any) -> Any:
        hx, *rest = _without_batch_sizes(args)
        return _run(kind, source, hx, None, *rest)

    return run


def _without_batch_sizes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments after the input, in the form that torch uses for input that is not packed.

    For a packed sequence torch passes the batch sizes of the time steps first, and no ``batch_first``. Its data are the
    rows of all time steps one below the other, so nothing else differs.
    """
    is_packed = isinstance(args[2], (list, tuple))  # the weights, otherwise the second of them
    return (*args[1:], False) if is_packed else args


def _run(  # noqa: PLR0917, as torch's
    kind: str,
    source: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    if torch.is_autocast_enabled("cpu"):
        # CUDA's autocast casts inputs, states and weights of cuDNN's recurrent layers.
        dtype = torch.get_autocast_dtype("cpu")
        source, hx = source.to(dtype), hx.to(dtype)
        cx = None if cx is None else cx.to(dtype)
        weights = [weight.to(dtype) for weight in weights]
    hidden = weights[1].shape[0] // _GATES[kind]
    layout = (hidden, num_layers, bidirectional, batch_first)
    # The buffer that cuDNN has for the weights holds biases, wanted or not.
    n_biases = 0 if has_biases else 2 * _GATES[kind] * hidden * num_layers * (1 + bidirectional)
    return _CudnnRnn.apply(  # type: ignore[no-untyped-call]
        kind, layout, dropout, train, n_biases, source, hx, cx, *weights
    )


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _other("gru"),
    torch.rnn_tanh: _other("rnn"),
    torch.rnn_relu: _other("rnn"),
}
"""The replacement of each of torch's recurrent functions."""
