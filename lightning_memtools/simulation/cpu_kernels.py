"""The results of the CPU's kernels, for operators whose fake results take other memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lightning_memtools._torch import without_dispatch_modes
from lightning_memtools.memory.cuda_ops.rules import Call, Rule

aten = torch.ops.aten
_NO_REDUCTION = 0


def _loss(call: Call) -> Any:
    """Return a number that keeps the storage of a loss per element (BinaryOps.cpp, Loss.cpp: `resize_`)."""
    at = 3 if call.func is aten.binary_cross_entropy.default else 2
    if call.argument(at, "reduction", 1) == _NO_REDUCTION:
        return call.results()
    shape = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape)  # type: ignore[no-untyped-call]
    dtype = torch.result_type(call.args[0], call.args[1])
    return call.empty([shape.numel()], dtype).as_strided((), ())


def _recurrent(call: Call) -> Any:
    """Return what oneDNN's LSTM returns, with the workspace that it keeps for backward; that of a fake is empty."""
    out = call.results()
    if not torch.is_grad_enabled():
        return out
    tensors, options = call.args[:7], call.args[7:]
    shapes = tuple(tuple(one.shape) for one in tensors)
    n = _workspace_bytes(tensors[0].dtype, shapes, tuple(tuple(o) if isinstance(o, list) else o for o in options))
    return *out[:3], call.empty([n], torch.uint8)


@cache
def _workspace_bytes(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], options: tuple[Any, ...]) -> int:
    """Return the size of oneDNN's workspace. Only oneDNN knows it, so the layer runs once."""
    with without_dispatch_modes():
        tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        made = aten.mkldnn_rnn_layer.default(*tensors, *(list(o) if isinstance(o, tuple) else o for o in options))
        return int(made[3].nbytes)


CPU_KERNELS: dict[Any, Rule] = {
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default), _loss),
    aten.mkldnn_rnn_layer.default: _recurrent,
}
"""The kernel of each operator that differs."""
