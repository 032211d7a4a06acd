"""Reads and follows known values at the functions of torch, above its operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memtools._torch import (
    PACK_PADDED,
    PAD_PACKED,
    FakeTensor,
    tree_leaves,
    without_dispatch_modes,
)
from lightning_memtools.memory.virtual.storages import flat
from lightning_memtools.null_cuda.launch import computes_nothing
from lightning_memtools.simulation.known_values import RULES, FollowedCall, KnownValues

_RANDOM = re.compile("rand|dropout|bernoulli|multinomial|normal|uniform|exponential|poisson|empty|geometric|cauchy")
_NOT_FOLLOWED = frozenset({Tensor.backward, torch.autograd.grad, torch.autograd.backward, Tensor.requires_grad_})


def value_readers(values: KnownValues, replaced: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return replacements for functions that read tensor values, such as `Tensor.tolist`, that accept fake tensors.

    Args:
        values: The values of fake tensors, as far as they are known.
        replaced: Replacements that exist already. They are called in place of the originals.
    """

    def reader(function: Any, read: Callable[..., Any]) -> Callable[..., Any]:
        original = replaced.get(function, function)

        def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (read if isinstance(tensor, FakeTensor) else original)(tensor, *args, **kwargs)

        return run

    # torch's kernels for packed sequences read lengths without an operator.
    readers: dict[Any, Callable[..., Any]] = {PACK_PADDED: partial(_pack, values), PAD_PACKED: partial(_pad, values)}
    for layer in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
        readers[layer] = partial(_run, values, replaced.get(layer, layer))
    for read in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
        readers[read] = lambda tensor, *_args, read=read, **_options: values.find(read, (tensor,), {})
    return {function: reader(function, read) for function, read in readers.items()}


class FollowedValues(TorchFunctionMode):
    """Torch-function mode that computes tensor values on the CPU, for a CUDA stand-in that computes nothing.

    Functions that read no values run unchanged. A dispatch mode would see more calls, but it makes torch allocate
    differently: for example, gradients are no longer accumulated in place.
    """

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function. If it has to read tensor values, read the known values instead of the device's memory."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in _NOT_FOLLOWED:
            return func(*args, **kwargs)
        on_device = any(map(_holds_nothing, tree_leaves((args, kwargs))))
        if name == "item" and on_device and args[0].is_floating_point() and self._values.of(args[0]) is None:
            return AssumedFloat(1.0, lambda: self._values.assume("a number that is not known is 1.0"))
        answer = RULES.get(name) if on_device else None
        if answer is not None:
            result = answer(self._values, FollowedCall(name, func, args, kwargs, _holds_nothing))
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        if on_device or any(map(_holds_nothing, tree_leaves(out))):
            self._follow(name, func, args, kwargs, out)
        return out

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Store the values of the result `out` if they can be computed. If not, forget those of tensors written to."""
        writes = args and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__")))
        written = list(flat(args[0])) if writes else ()  # a list where the function is one of foreach
        known_as = name.strip("_") if name.startswith("__") and name not in RULES else name
        is_followed = _RANDOM.search(name) is None
        self._values.follow(FollowedCall(known_as, func, args, kwargs, _holds_nothing, written, is_followed), out)


class AssumedFloat(float):
    """A number that is assumed instead of computed, such as a loss.

    Printing it or adding it up is harmless. Comparisons are reported, as they decide what the script does next.
    """

    __hash__ = float.__hash__

    def __new__(cls, value: float, note: Callable[[], object]) -> Self:
        """Make a number that calls `note` when it is compared."""
        made = super().__new__(cls, value)
        made.note = note
        return made

    note: Callable[[], object]

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (super().__float__(),)  # a copy or a pickle is a plain number


def _of_assumed(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of float. A float that it returns becomes an AssumedFloat, and other results are noted."""

    def run(number: AssumedFloat, *others: Any) -> Any:
        result = operation(number, *others)
        if isinstance(result, float):
            return AssumedFloat(result, number.note)
        if result is not NotImplemented:
            number.note()
        return result

    return run


for _name in (
    "lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "trunc", "floor", "ceil",
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs",
):  # fmt: skip
    setattr(AssumedFloat, f"__{_name}__", _of_assumed(getattr(float, f"__{_name}__")))


def _holds_nothing(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda and _computes_nothing(value.device)


_computes_nothing = cache(computes_nothing)


class _PackedSequences(torch.autograd.Function):
    """Packs padded sequences as torch does (PackedSequence.cpp), given the number of sequences at each time step."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, sizes: list[int], batch_first: bool) -> Tensor:
        """Return the rows of all time steps, concatenated, without padding. `sizes` has the rows per time step."""
        steps = source.transpose(0, 1) if batch_first else source
        ctx.shape, ctx.batch_first = steps.shape, batch_first
        parts = [
            steps[first:last, :n].contiguous().view(-1, *steps.shape[2:]) for first, last, n in _runs_of_equal(sizes)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return a gradient with the shape of the padded input. Fake tensors have no values, so it is all zeros."""
        out = gradients[0].new_zeros(ctx.shape)
        return (out.transpose(0, 1) if ctx.batch_first else out), None, None


def _runs_of_equal(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, number of sequences) for each run of time steps with the same number of sequences."""
    first = 0
    for size, run in groupby(sizes):
        last = first + len(list(run))
        yield first, last, size
        first = last


def _pack(values: KnownValues, source: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    known = values.read(lengths)
    with without_dispatch_modes():
        sizes: list[int] = [int((known > step).sum()) for step in range(int(known.max()))]
    packed: Tensor = _PackedSequences.apply(source, sizes, batch_first)  # type: ignore[no-untyped-call]
    return packed, torch.tensor(sizes)


def _pad(values: KnownValues, source: Tensor, batch_sizes: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    batch_first, padding_value, total_length = options
    known = values.read(batch_sizes)
    with without_dispatch_modes():
        sizes: list[int] = known.tolist()
    length = max(total_length, len(sizes))
    out = source.new_full((length, sizes[0], *source.shape[1:]), padding_value)
    offset = 0
    for first, last, n in _runs_of_equal(sizes):
        rows = source[offset : offset + (last - first) * n]
        out[first:last, :n].copy_(rows.view(last - first, n, *source.shape[1:]))
        offset += (last - first) * n
    lengths = torch.tensor([sum(n > at for n in sizes) for at in range(sizes[0])])
    return (out.transpose(0, 1) if batch_first else out), lengths


def _run(values: KnownValues, function: Callable[..., Any], source: Tensor, sizes: Any, *args: Any) -> Any:
    """Run an RNN function such as `torch.lstm`. For packed input, replace the tensor `sizes` with its known values."""
    is_packed = isinstance(args[1], (list, tuple))  # the weights; otherwise they come second
    return function(source, values.read(sizes) if is_packed else sizes, *args)
