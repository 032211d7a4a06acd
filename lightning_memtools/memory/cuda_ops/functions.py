"""Functions of torch that act differently on a CUDA device: attention, norms, recurrent layers and moves to the GPU.

A recurrent layer runs as cuDNN runs it: all time steps in one kernel, with a workspace and a reserve space. Only cuDNN
knows the sizes of these (cudnnGetRNNTempSpaceSizes). They were measured with cuDNN 9.19 on an H100: of 195 layers the
reserve space is equal to the byte, the workspace is 10% off in the median and 54% at most. The null device has the same
formulas (null_cuda/sources/cudnn.c), so all else is checked against PyTorch's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_memtools._torch import ENGINE_RUN, kept_in_backward, storage_id, without_autocast_on_cpu
from lightning_memtools.memory.cuda_ops.attention import attention
from lightning_memtools.memory.cuda_ops.autocast import cast
from lightning_memtools.memory.cuda_ops.rules import Call, Rule, copy_bytes, nbytes
from lightning_memtools.memory.sizes import MIB, GpuShape
from lightning_memtools.memory.virtual.patches import Patches

aten = torch.ops.aten
# By cuDNN's mode: a plain layer with ReLU or tanh, LSTM, GRU.
_PLAIN, _LSTM, _GRU = 1, 2, 3
_KEPT_PER_UNIT = (1, 1, 5, 6)
_GATES = (1, 1, 4, 3)
_WITH_BIASES = 4  # tensors a layer and direction


class _CastIntoOne(torch.autograd.Function):
    """Casts the weights of an RNN into one buffer and returns views of it, as autocast does for cuDNN."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, has_biases: bool, *weights: torch.Tensor) -> Any:
        ctx.dtypes = [weight.dtype for weight in weights]
        return tuple(_copied_into_one(weights, has_biases, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # Each weight has a cast of its own there, and autograd goes through them from the last to the first.
        return None, None, *[one.to(dtype) for one, dtype in reversed([*zip(gradients, ctx.dtypes, strict=True)])][::-1]


def cudnn_rnn(call: Call) -> Any:
    """Allocate a layer's results and reserve space, and also its weights in one buffer unless they are in one."""
    source, weights, n_tensors, flat, hx, cx = call.args[:6]
    settings = call.args[6:14]
    in_time_order = _turned(source, settings)
    n_work, n_kept = cudnn_spaces(settings, source)
    call.hold(copy_bytes(in_time_order))
    out = call.empty([*in_time_order.shape[:-1], hx.shape[-1] * (1 + settings[7])], source.dtype)
    states = [None if one is None else call.run(aten.empty_like.default, one) for one in (hx, cx)]
    buffer = call.empty([_size_of_buffer(weights, n_tensors == _WITH_BIASES) if flat is None else 0], source.dtype)
    call.hold(n_work)
    return _turned(out, settings), *states, call.empty([n_kept if settings[6] else 0], torch.uint8), buffer


def cudnn_rnn_backward(call: Call) -> Any:
    """Allocate the gradients of a layer's input, states and weights, and the copies and workspaces of the kernels."""
    source, weights, n_tensors, _, hx, cx, out, *gradients = call.args[:10]
    settings, wanted = call.args[10:18], call.args[-1]
    of_results = [*zip((out, hx, cx), gradients, strict=True)]
    call.hold(*(nbytes(result) for result, gradient in of_results if gradient is None and result is not None))
    # Time steps come first in cuDNN: without batch_first, input and gradient mostly lie so already.
    copied = [0 if one is None else copy_bytes(_turned(one, settings)) for one in (source, gradients[0])]
    n_work, _ = cudnn_spaces(settings, source)
    call.hold(*copied)
    # cuDNN computes these gradients on its way to those of the weights, wanted or not.
    inputs = [call.empty(_turned(source, settings).shape, source.dtype)]
    inputs += [None if one is None else call.run(aten.empty_like.default, one) for one in (hx, cx)]
    call.hold(n_work)
    call.release(*copied, n_work)
    # It writes the gradients of all weights into one tensor, of which they are views. That of a layer without
    # biases has those of biases too, so torch copies the others out of it (_cudnn_rnn_backward_weight).
    call.hold(copied[0])
    has_biases = n_tensors == _WITH_BIASES
    buffer = call.empty([_size_of_buffer(weights, has_biases)], source.dtype)
    call.hold(n_work)
    parts = _views_of(buffer, weights) if has_biases else [call.run(aten.empty_like.default, one) for one in weights]
    inputs[0] = _turned(inputs[0], settings)
    return *(one if needed else None for one, needed in zip(inputs, wanted, strict=False)), parts


def cudnn_spaces(settings: Sequence[Any], source: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of cuDNN's workspace and reserve space.

    Args:
        settings: The arguments of ``aten::_cudnn_rnn`` from `mode` to `bidirectional`.
        source: The layer's input.
    """
    mode, hidden, _, n_layers, _, dropout, _, both_ways = settings
    n_places, directions = source.numel() // source.shape[-1], 1 + both_ways
    n_units, outs = n_places * hidden * directions * n_layers, n_places * hidden * directions
    work = n_layers * directions * 8 * MIB + (5 * outs + _GATES[mode] * n_units) * source.element_size()
    kept = (_KEPT_PER_UNIT[mode] * n_units + outs * (n_layers - 1)) * source.element_size()
    kept += (n_layers - 1) * -(-outs // 8) if dropout else 0  # a bit for each that is dropped
    return work, -(-kept // 32) * 32 + 256


def _turned(tensor: torch.Tensor, settings: Sequence[Any]) -> torch.Tensor:
    """Swap the first two dimensions, batch and time, if the layer's batch comes first; else return the tensor."""
    return tensor.transpose(0, 1) if settings[4] else tensor


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
        with torch.no_grad():
            parts = _copied_into_one(weights, layer.bias, weights[0].dtype)
            enter(parts[0])
            for weight, part in zip(weights, parts, strict=True):
                weight.data = part


def _is_flattened(weight: torch.Tensor) -> bool:
    return weight.dtype in torch.backends.cudnn.CUDNN_TENSOR_DTYPES


def _size_of_buffer(weights: Sequence[torch.Tensor], has_biases: bool) -> int:
    """Return the number of elements of cuDNN's buffer for weights. It has room for biases also without them."""
    return sum(one.numel() for one in weights) + (0 if has_biases else len(weights) * weights[0].shape[0])


def _views_of(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors with the shapes of `like` that lie one after the other in a buffer."""
    sizes = [one.numel() for one in like]
    parts = torch.split(buffer[: sum(sizes)], sizes)
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _copied_into_one(weights: Sequence[torch.Tensor], has_biases: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    parts = _views_of(weights[0].new_empty(_size_of_buffer(weights, has_biases), dtype=dtype), weights)
    for part, weight in zip(parts, weights, strict=True):
        part.copy_(weight)
    return parts


def _recurrent(mode: int, source: torch.Tensor, *args: Any) -> Any:
    """Run one of torch's recurrent functions as cuDNN's operator. `mode` is cuDNN's number of the kind of layer."""
    # For a packed sequence torch passes the batch sizes of the time steps first, and no `batch_first`. Its data are the
    # rows of all time steps one below the other, so nothing else differs.
    is_packed = isinstance(args[2], (list, tuple))  # the weights, otherwise the second of them
    given = (*args[1:], False) if is_packed else args
    states, weights, has_biases, n_layers, dropout, train, both_ways, batch_first = given
    hx, cx = states if mode == _LSTM else (states, None)
    is_flat = _is_flattened(weights[0])
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.float16  # under autocast to bfloat16 too
        if weights[0].dtype is torch.float32:
            weights = _CastIntoOne.apply(dtype, has_biases, *weights)  # type: ignore[no-untyped-call]
            is_flat = True
        cx = None if cx is None else cx.to(dtype)
        hx, source = hx.to(dtype), source.to(dtype)  # in this order
    settings = mode, hx.shape[-1], 0, n_layers, batch_first, dropout, train, both_ways
    flat, n_tensors = weights[0].detach() if is_flat else None, _WITH_BIASES if has_biases else 2
    results = aten._cudnn_rnn(source, list(weights), n_tensors, flat, hx, cx, *settings, [], None)
    return results[: 2 if cx is None else 3]


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


_RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: _cell,
    torch.gru_cell: _cell,
    torch.lstm: partial(_recurrent, _LSTM),
    torch.gru: partial(_recurrent, _GRU),
    torch.rnn_tanh: partial(_recurrent, _PLAIN),
    torch.rnn_relu: partial(_recurrent, _PLAIN),
}

CUDNN: dict[Any, Rule] = {
    aten._cudnn_rnn.default: cudnn_rnn,
    aten._cudnn_rnn_backward.default: cudnn_rnn_backward,
}


class ReplacedFunctions(TorchFunctionMode):
    """Mode that replaces some of torch's functions, even while gradient checkpointing recomputes layers in backward.

    Within it, `.cuda()`, `.to("cuda")` and `device="cuda"` return CPU tensors. In an estimate, CPU tensors stand for
    CUDA tensors, and torch may have been built without CUDA.

    Args:
        replacements: The replacement of each function.
    """

    def __init__(self, replacements: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._replacements = replacements
        self._patches = Patches()

    def __enter__(self) -> Self:
        """Enter the mode, and also patch F.scaled_dot_product_attention.

        The patch is for calls inside torch's own functions, which the mode does not see: nn.MultiheadAttention
        calls attention in this way.
        """
        self._patches.replace(*ENGINE_RUN, kept_in_backward(self))
        attend = self._replacements.get(F.scaled_dot_product_attention)
        if attend is not None:
            # `Patches` gives the replacement the original's name, so it has to be an object of its own.
            self._patches.replace(F, "scaled_dot_product_attention", lambda _: partial(attend))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the mode, and undo the patches that `__enter__` made."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.undo()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function or its replacement, with "cpu" in place of any CUDA device."""
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is not torch.device and (any(map(_names_cuda, args)) or _names_cuda(kwargs.get("device"))):
            args = tuple("cpu" if _names_cuda(one) else one for one in args)
            kwargs = {name: "cpu" if _names_cuda(value) else value for name, value in kwargs.items()}
        return self._replacements.get(func, func)(*args, **kwargs)


def _names_cuda(thing: Any) -> bool:
    kind = type(thing)
    return (kind is torch.device and thing.type == "cuda") or (kind is str and thing[:4] == "cuda")


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates the memory of CUDA's fused rms_norm. It computes no values, so it works for fake tensors only."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor | None, n_normalized: int) -> torch.Tensor:
        """Allocate the result, and one float32 value per row for the reciprocal root mean square."""
        out = torch.empty_like(source.contiguous())
        rstd = source.new_empty(source.shape[: source.dim() - n_normalized], dtype=torch.float32)
        ctx.save_for_backward(source, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        """Allocate the gradients of the input and the weight."""
        source, weight, _ = ctx.saved_tensors
        return torch.empty_like(source.contiguous()), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    source: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """Run rms_norm as CUDA does: as one fused kernel, unless input and weight differ in dtype."""
    if torch.is_autocast_enabled("cpu"):  # on CUDA's list for float32
        source, weight = source.float(), None if weight is None else weight.float()
    if weight is not None and weight.dtype is not source.dtype:
        with without_autocast_on_cpu():
            return torch.rms_norm(source, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(source, weight, len(normalized_shape))  # type: ignore[no-untyped-call]


def cuda_functions(gpu: GpuShape) -> dict[Any, Callable[..., Any]]:
    """Return replacements for torch's attention, rms_norm and RNN functions, to allocate memory as on a given GPU."""
    attend = partial(attention, gpu=gpu)
    return {F.scaled_dot_product_attention: attend, F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm, **_RECURRENT}
