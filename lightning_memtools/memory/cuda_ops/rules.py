"""Rules for operators whose results or workspaces CUDA allocates otherwise than fake tensors show.

A rule is called in place of its operator. It returns the results, and holds what the kernel allocates beside them while
it runs: before, after or between the results, as the kernel does. Operators without a rule allocate what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_memtools._torch import current_graph_task, is_view
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator, passed to a rule: a function that runs in its place and allocates memory as CUDA does.

    Attributes:
        run: Runs an operator, and allocates its results on the simulated device.
        func: The operator.
        args: The operator's positional arguments.
        kwargs: The operator's keyword arguments.
        gpu: The simulated GPU.
        hold: Allocates temporary blocks of the given sizes in bytes. They are freed when the rule returns.
        release: Frees temporary blocks of the given sizes earlier than that.
    """

    run: Callable[..., Any]
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gpu: GpuShape
    hold: Callable[..., None]
    release: Callable[..., None]

    def results(self) -> Any:
        """Run the operator itself, and return its results."""
        return self.run(self.func, *self.args, **self.kwargs)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """Return a new, uninitialized tensor on the simulated device."""
        return self.run(aten.empty.memory_format, shape, dtype=dtype, device=torch.device("cpu"))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return the argument that was passed at position `place` or by this name; `default` if there is none."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


Rule = Callable[[Call], Any]


def nbytes(tensor: torch.Tensor) -> int:
    """Return the size in bytes of a dense copy of a tensor."""
    return tensor.numel() * tensor.element_size()


def copy_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the copy that `Tensor.contiguous` makes; 0 if it makes none."""
    return 0 if tensor.is_contiguous() else nbytes(tensor)


def layer_norm(call: Call) -> Any:
    """Run layer norm, and allocate memory as CUDA does: for half-precision inputs, mean and rstd are float32."""
    source, normalized = call.args[:2]
    call.hold(copy_bytes(source))
    if source.dtype not in HALF:
        return call.results()
    shape = [*source.shape[: source.dim() - len(normalized)], *[1] * len(normalized)]
    out = call.run(aten.empty_like.default, source, memory_format=torch.contiguous_format)
    return out, *(call.empty(shape, torch.float32) for _ in range(2))


def batch_norm(call: Call) -> Any:
    """Allocate batch norm's output, mean and rstd as CUDA does. In evaluation, cuDNN allocates only the output."""
    source, weight, training = call.args[0], call.args[1], call.args[5]
    # _select_batch_norm_backend takes torch's own kernels for rows.
    by_cudnn = source.dtype in {torch.float32, torch.float16} and weight is not None and weight.dtype is torch.float32
    if by_cudnn and not training and source.dim() > 2:  # noqa: PLR2004
        return call.results()
    dtype = torch.float32 if source.dtype in HALF else source.dtype
    out = call.run(aten.empty_like.default, source)
    return out, *(call.empty([source.shape[1]], dtype) for _ in range(2))


def dropout(call: Call) -> Any:
    """Allocate dropout's mask, then its output, as CUDA does. The order decides which free block each one takes."""
    source, share, *training = call.args
    if not 0 < share < 1 or call.kwargs or training == [False]:
        return call.results()
    mask = call.run(aten.empty_like.default, source, dtype=torch.bool)
    return call.run(aten.empty_like.default, source), mask


def softmax(call: Call) -> Any:
    """Run softmax, and allocate the temporary copy that the CUDA kernel makes of a non-contiguous input."""
    out = call.results()
    call.hold(copy_bytes(call.args[0]))
    return out


def softmax_backward(call: Call) -> Any:
    """Run softmax's backward, and allocate two temporaries: gradient * output, and the output made contiguous."""
    out, output = call.results(), call.args[1]
    call.hold(nbytes(output), copy_bytes(output))
    return out


def log_softmax_backward(call: Call) -> Any:
    """Run log_softmax's backward, and allocate a temporary copy of a non-contiguous gradient or output."""
    out = call.results()
    call.hold(*map(copy_bytes, call.args[:2]))
    return out


def safe_softmax(call: Call) -> Any:
    """Run softmax, and allocate the temporary masks with which CUDA zeroes rows that are all -inf."""
    source, dim = call.args[:2]
    out = call.run(aten._softmax.default, source, dim, False)  # noqa: FBT003, half to float
    call.hold(source.numel(), source.numel() // max(source.shape[dim], 1), source.element_size())
    return out


def logsumexp(call: Call) -> Any:
    """Run logsumexp, and allocate its temporaries: the maxima and the exponentials."""
    out = call.results()
    call.hold(nbytes(out), nbytes(call.args[0]))
    return out


def log_sigmoid(call: Call) -> Any:
    """Allocate log_sigmoid's output and its buffer for backward. Unlike on the CPU, that buffer is empty on CUDA."""
    source = call.args[0]
    return call.run(aten.empty_like.default, source), call.empty([0], source.dtype)


def fused_cell(call: Call) -> Any:
    """Return a cell's new states, and what it keeps for backward: per hidden unit, 4 values for LSTM or 5 for GRU."""
    state = call.args[2]
    is_lstm = call.func is aten._thnn_fused_lstm_cell.default
    kept = call.empty([state.shape[0], (4 if is_lstm else 5) * state.shape[1]], state.dtype)
    return *(call.run(aten.empty_like.default, state) for _ in range(1 + is_lstm)), kept


def gru_cell_backward(call: Call) -> Any:
    """Return the gradients of a GRU cell: input gates, hidden gates, hidden state, input bias and hidden bias."""
    gradient, kept, has_bias = call.args
    of_gates = [call.empty([kept.shape[0], kept.shape[1] // 5 * 3], kept.dtype) for _ in range(2)]
    of_state = call.run(aten.empty_like.default, gradient)
    return *of_gates, of_state, *(call.run(aten.sum.dim_IntList, one, [0]) if has_bias else None for one in of_gates)


_MAX = 2  # a mode of bags


def embedding_bag(call: Call) -> Any:
    """Allocate what embedding_bag returns: output, bag of each index, size of each bag, in "max" mode also indices."""
    weight, indices, offsets = call.args[:3]
    n_bags, width = offsets.numel() - bool(call.argument(7, "include_last_offset")), weight.shape[1]
    sizes, bags = call.empty([n_bags], indices.dtype), call.empty([indices.numel()], indices.dtype)
    out, is_max = call.empty([n_bags, width], weight.dtype), call.argument(4, "mode") == _MAX
    return out, bags, sizes, call.empty([n_bags, width] if is_max else [0], indices.dtype)


def gradient_sum(call: Call) -> Any:
    """Accumulate a gradient in place into an earlier gradient of the same tensor, as autograd does in a real run.

    For fake tensors and under dispatch modes, autograd allocates a new tensor for the sum. With residual connections,
    this would raise the peak by the size of one activation. Two other kinds of additions look the same to this rule,
    and so also run in place: additions inside a backward formula, and additions to a gradient that another branch
    still needs. Views are never changed in place.
    """
    total, gradient = call.args[:2]
    is_sum = not call.kwargs and current_graph_task() != -1 and not torch.is_grad_enabled()
    if is_sum and isinstance(gradient, torch.Tensor) and total is not gradient and _are_alike(total, gradient):
        return call.run(aten.add_.Tensor, total, gradient)
    return call.results()


def _are_alike(total: torch.Tensor, gradient: torch.Tensor) -> bool:
    is_strided = total.layout is gradient.layout is torch.strided
    is_owned = is_strided and not is_view(total) and span(total) == total.numel()
    return is_owned and total.shape == gradient.shape and total.dtype is gradient.dtype


def span(tensor: torch.Tensor) -> int:
    """Return the number of elements that a tensor spans in memory, from its first to its last, including gaps."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


RULES: dict[Any, Rule] = {
    aten.native_layer_norm.default: layer_norm,
    aten.native_batch_norm.default: batch_norm,
    aten.native_dropout.default: dropout,
    aten._softmax.default: softmax,
    aten._log_softmax.default: softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten._safe_softmax.default: safe_softmax,
    aten.logsumexp.default: logsumexp,
    aten.log_sigmoid_forward.default: log_sigmoid,
    aten._thnn_fused_lstm_cell.default: fused_cell,
    aten._thnn_fused_gru_cell.default: fused_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    aten.add.Tensor: gradient_sum,
}
