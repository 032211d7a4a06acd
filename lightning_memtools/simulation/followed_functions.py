"""Reads and follows known values at the functions of torch, above its operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memtools._torch import PACK_PADDED, PAD_PACKED, FakeTensor, tree_leaves, without_dispatch_modes
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
    # torch's kernels for packed sequences read lengths without an operator.
    readers: dict[Any, Callable[..., Any]] = {PACK_PADDED: partial(_pack, values), PAD_PACKED: partial(_pad, values)}
    for layer in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
        readers[layer] = partial(_run, values, replaced.get(layer, layer))
    for read in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
        readers[read] = lambda tensor, *_args, read=read, **_options: values.find(read, (tensor,), {})
    # Of tensors in a list, these read the numbers from memory.
    for reads in (Tensor.__getitem__, Tensor.__setitem__, torch.tensor):
        readers[reads] = lambda *args, reads=reads, **options: reads(*map(_with_numbers, args), **options)
    return readers


def _with_numbers(value: Any) -> Any:
    """Return an argument with numbers in place of the fakes of one number in its lists."""
    if type(value) not in {list, tuple}:
        return value
    is_list = type(value) is list
    made = [
        one.item() if is_list and isinstance(one, FakeTensor) and not one.dim() else _with_numbers(one) for one in value
    ]
    return made if is_list else tuple(made)


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
        if name == "ctc_loss" and on_device:  # its kernel reads the lengths without an operator
            args = *args[:2], *(self._values.read(n) if isinstance(n, Tensor) else n for n in args[2:4]), *args[4:]
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


def _pack(values: KnownValues, source: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Select the rows of all time steps, without padding. torch copies them first; that memory is not counted."""
    known = values.read(lengths)
    with without_dispatch_modes():
        is_there = torch.arange(int(known.max()))[:, None] < known
        sizes = is_there.sum(1).tolist()
    steps = source.transpose(0, 1) if batch_first else source
    return steps[: len(sizes)][values.new(is_there, source)], torch.tensor(sizes)


def _pad(values: KnownValues, source: Tensor, batch_sizes: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    batch_first, padding_value, total_length = options
    known = values.read(batch_sizes)
    with without_dispatch_modes():
        is_there = torch.arange(int(known[0])) < known[:, None]
        lengths = is_there.sum(0).tolist()
    out = source.new_full((max(total_length, len(known)), len(lengths), *source.shape[1:]), padding_value)
    out[: len(known)][values.new(is_there, source)] = source
    return (out.transpose(0, 1) if batch_first else out), torch.tensor(lengths)


def _run(values: KnownValues, function: Callable[..., Any], source: Tensor, sizes: Any, *args: Any) -> Any:
    """Run an RNN function such as `torch.lstm`. For packed input, replace the tensor `sizes` with its known values."""
    is_packed = isinstance(args[1], (list, tuple))  # the weights; otherwise they come second
    return function(source, values.read(sizes) if is_packed else sizes, *args)
