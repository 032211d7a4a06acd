"""Recurrent layers as cuDNN runs them: all time steps in one kernel, with a workspace and a reserve space for backward.

Only cuDNN knows the sizes of these (cudnnGetRNNTempSpaceSizes). They were measured with cuDNN 9.19 on an H100: of 195
layers the reserve space is equal to the byte, the workspace is 10% off in the median and 54% at most. The null device
has the same formulas (null_cuda/sources/cudnn.c), so all else is checked against PyTorch's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_memtools._torch import storage_id, without_autocast_on_cpu
from lightning_memtools.memory.cuda_ops.autocast import cast
from lightning_memtools.memory.sizes import MIB

aten = torch.ops.aten
_KEPT_PER_UNIT = {"lstm": 5, "gru": 6, "rnn": 1}
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


class _CastIntoOne(torch.autograd.Function):
    """Casts the weights of an RNN into one buffer and returns views of it, as autocast does for cuDNN."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, n_biases: int, *weights: torch.Tensor) -> Any:
        ctx.dtypes = [weight.dtype for weight in weights]
        return tuple(_copied_into_one(weights, n_biases, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # Each weight has a cast of its own there, and autograd goes through them from the last to the first.
        return None, None, *[one.to(dtype) for one, dtype in reversed([*zip(gradients, ctx.dtypes, strict=True)])][::-1]


class _CudnnRnn(torch.autograd.Function):
    """Allocates the memory of a recurrent layer in cuDNN. It computes no values, so it works for fake tensors only."""

    @staticmethod
    def forward(  # noqa: PLR0917, autograd gives all by position
        ctx: Any,
        kind: str,
        layout: tuple[int, int, bool, bool],
        dropout: float,
        train: bool,
        n_biases: int,
        is_flat: bool,
        source: torch.Tensor,
        hx: torch.Tensor,
        cx: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> Any:
        _, _, both_ways, batch_first = layout
        n_out = hx.shape[-1] * (2 if both_ways else 1)
        in_time_order = _turned(source, batch_first).contiguous()
        out = _turned(source.new_empty((*in_time_order.shape[:-1], n_out)), batch_first)
        states = [torch.empty_like(hx), *([] if cx is None else [torch.empty_like(cx)])]
        n_flat = n_biases + sum(weight.numel() for weight in weights)
        flat = None if is_flat else source.new_empty(n_flat)
        ctx.n_work, n_kept = cudnn_spaces(kind, layout, dropout, source, n_out)
        workspace = source.new_empty(ctx.n_work, dtype=torch.uint8)
        if train:
            reserve = source.new_empty(n_kept, dtype=torch.uint8)
            ctx.save_for_backward(source, hx, cx, *weights, out, reserve, flat)
        # Zeros in place of missing gradients are made when what was kept is there: a layer may run again for that.
        ctx.set_materialize_grads(False)
        ctx.n_weights, ctx.n_biases, ctx.batch_first = len(weights), n_biases, batch_first
        del in_time_order, workspace
        return out, *states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        saved = ctx.saved_tensors  # all of them until the end: cuDNN reads the reserve space
        source, hx, cx, *weights, out = saved[: 4 + ctx.n_weights]
        of_results = zip(gradients, (out, hx, cx), strict=False)
        gradients = tuple(torch.zeros_like(like) if one is None else one for one, like in of_results)
        # Time steps come first in cuDNN: without batch_first, input and gradient mostly lie so already.
        in_time_order = [_turned(one, ctx.batch_first).contiguous() for one in (source, gradients[0])]
        # cuDNN computes these gradients on its way to those of the weights, wanted or not.
        of_source, of_hx = source.new_empty(in_time_order[0].shape), torch.empty_like(hx)
        of_cx = None if cx is None else torch.empty_like(cx)
        workspace = source.new_empty(ctx.n_work, dtype=torch.uint8)
        del in_time_order, workspace
        in_time_order = [_turned(source, ctx.batch_first).contiguous()]
        # It writes the gradients of all weights into one tensor, of which they are views. That of a layer without
        # biases has those of biases too, so torch copies the others out of it (_cudnn_rnn_backward_weight).
        parts = _views_of_one(weights, ctx.n_biases, source.dtype)
        workspace = source.new_empty(ctx.n_work, dtype=torch.uint8)
        if ctx.n_biases:
            parts = [torch.empty_like(weight) for weight in weights]
        del in_time_order, workspace
        wanted = ctx.needs_input_grad[6:9]
        of_inputs = _turned(of_source, ctx.batch_first), of_hx, of_cx
        return *[None] * 6, *(one if needed else None for one, needed in zip(of_inputs, wanted, strict=True)), *parts


def cudnn_spaces(
    kind: str, layout: tuple[int, int, bool, bool], dropout: float, source: torch.Tensor, n_out: int
) -> tuple[int, int]:
    """Return the bytes of cuDNN's workspace and reserve space; `layout`: hidden size, layers, bidirectional, unused."""
    hidden, n_layers, both_ways, _ = layout
    n_places, directions = source.numel() // source.shape[-1], 1 + both_ways
    n_units, outs = n_places * hidden * directions * n_layers, n_places * n_out
    work = n_layers * directions * 8 * MIB + (5 * outs + _GATES[kind] * n_units) * source.element_size()
    kept = (_KEPT_PER_UNIT[kind] * n_units + outs * (n_layers - 1)) * source.element_size()
    kept += (n_layers - 1) * -(-outs // 8) if dropout else 0  # a bit for each that is dropped
    return work, -(-kept // 32) * 32 + 256


def _turned(tensor: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Swap the first two dimensions, batch and time, if `batch_first`; otherwise return the tensor unchanged."""
    return tensor.transpose(0, 1) if batch_first else tensor


def flatten_weights(layer: nn.Module, enter: Callable[[torch.Tensor], object]) -> None:
    """Move a recurrent layer's weights into one buffer, as moving the layer to CUDA does. Other layers are not changed.

    `enter` puts the new buffer on the device, before the old weights are freed: for a moment, both take memory.

    Weights in bfloat16, which torch.backends.cudnn.is_acceptable rejects, stay separate; each forward copies them.
    """
    if not isinstance(layer, nn.RNNBase):
        return
    weights = [one for part in layer.all_weights for one in part]
    are_apart = len({storage_id(weight.untyped_storage()) for weight in weights}) == len(weights)
    if are_apart and len({weight.dtype for weight in weights}) == 1 and _is_flattened(weights[0]):
        n_rows: int = layer.all_weights[0][0].shape[0]
        # cuDNN's buffer has room for biases also without them.
        n_biases = 0 if layer.bias else 2 * n_rows * layer.num_layers * (1 + layer.bidirectional)
        with torch.no_grad():
            parts = _copied_into_one(weights, n_biases, weights[0].dtype)
            enter(parts[0])
            for weight, part in zip(weights, parts, strict=True):
                weight.data = part


def _is_flattened(weight: torch.Tensor) -> bool:
    return weight.dtype in torch.backends.cudnn.CUDNN_TENSOR_DTYPES


def _views_of_one(like: Sequence[torch.Tensor], n_biases: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return new tensors with the shapes of `like`: views of one buffer that ends with `n_biases` unused elements."""
    sizes = [one.numel() for one in like]
    buffer = like[0].new_empty(sum(sizes) + n_biases, dtype=dtype)
    parts = torch.split(buffer[: sum(sizes)], sizes)
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _copied_into_one(weights: Sequence[torch.Tensor], n_biases: int, dtype: torch.dtype) -> list[torch.Tensor]:
    parts = _views_of_one(weights, n_biases, dtype)
    for part, weight in zip(parts, weights, strict=True):
        part.copy_(weight)
    return parts


def _recurrent(kind: str, source: torch.Tensor, *args: Any) -> Any:
    """Run one of torch's recurrent functions ("lstm", "gru" or "rnn") on fake tensors, with cuDNN's memory."""
    # For a packed sequence torch passes the batch sizes of the time steps first, and no `batch_first`. Its data are the
    # rows of all time steps one below the other, so nothing else differs.
    is_packed = isinstance(args[2], (list, tuple))  # the weights, otherwise the second of them
    given = (*args[1:], False) if is_packed else args
    states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = given
    hx, cx = states if kind == "lstm" else (states, None)
    hidden = weights[1].shape[0] // _GATES[kind]
    # The buffer that cuDNN has for the weights holds biases, wanted or not.
    n_biases = 0 if has_biases else 2 * _GATES[kind] * hidden * num_layers * (1 + bidirectional)
    is_flat = _is_flattened(weights[0])
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.float16  # under autocast to bfloat16 too
        if weights[0].dtype is torch.float32:
            weights = _CastIntoOne.apply(dtype, n_biases, *weights)  # type: ignore[no-untyped-call]
            is_flat = True
        cx = None if cx is None else cx.to(dtype)
        hx, source = hx.to(dtype), source.to(dtype)  # in this order
    layout = (hidden, num_layers, bidirectional, batch_first)
    return _CudnnRnn.apply(  # type: ignore[no-untyped-call]
        kind, layout, dropout, train, n_biases, is_flat, source, hx, cx, *weights
    )


def _cell(  # noqa: PLR0917, as torch's
    source: torch.Tensor, states: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """Run an LSTM or GRU cell as CUDA does: two matrix products, then one kernel for all gates."""
    is_lstm = isinstance(states, (list, tuple))
    given: Any = source, *(states if is_lstm else (states, None)), w_ih, w_hh, b_ih, b_hh
    if torch.is_autocast_enabled("cpu"):
        # As the compiled code evaluates a call's arguments: the last first.
        given = tuple(cast(one, torch.get_autocast_dtype("cpu")) for one in given[::-1])[::-1]
    source, hx, cx, w_ih, w_hh, b_ih, b_hh = given
    with without_autocast_on_cpu():
        gates = source @ w_ih.t(), hx @ w_hh.t()
        if is_lstm:
            return aten._thnn_fused_lstm_cell(*gates, cx, b_ih, b_hh)[:2]
        return aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: _cell,
    torch.gru_cell: _cell,
    torch.lstm: partial(_recurrent, "lstm"),
    torch.gru: partial(_recurrent, "gru"),
    torch.rnn_tanh: partial(_recurrent, "rnn"),
    torch.rnn_relu: partial(_recurrent, "rnn"),
}
"""The replacement of each of torch's recurrent functions for fake tensors."""
