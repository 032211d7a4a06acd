"""Follows the values of a step's data, and what is computed from them alone, beside tensors without values.

A traced step has sizes and no values: its tensors are fakes, or lie on a CUDA device that computes nothing. But the
batch is known, and so are a model's buffers. So a tensor whose values are known has a twin in host memory, and each
operator on known tensors alone is computed on their twins too. `int(batch.max())`, `x[mask]`, `repeat_interleave` and
packed sequences then have the sizes of the real step.

What depends on values that nobody computed is assumed: floats are finite, a mask selects everything, a flag is set, a
number is 1, a single random number is the largest that may be drawn, what is sorted is in order, and each index is that
of the largest value equally often. Each such read is listed with its line (`KnownValues.assumed`).
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memtools._torch import (
    ENGINE_RUN,
    LIFT_FRESH,
    LOCAL_SCALAR,
    PACK_PADDED,
    PAD_PACKED,
    FakeTensor,
    OpOverload,
    StorageWeakRef,
    has_readable_values,
    in_backward,
    kept_in_backward,
    operator_schema,
    storage_id,
    tree_leaves,
    tree_map_only,
    without_dispatch_modes,
)
from lightning_memtools.memory.user_code import LIGHTNING_PACKAGES, calling_package, line_on_stack
from lightning_memtools.memory.virtual.patches import Patches
from lightning_memtools.memory.virtual.storages import flat, given_tensors
from lightning_memtools.null_cuda.launch import computes_nothing

aten = torch.ops.aten

_MOST_INTEGERS = 2**22
_MOST_FLOATS = 2**18
_MANY = 1024  # entries, after which those of tensors that are gone are removed

# Functions and operators that make tensors of their arguments alone.
_FACTORIES = {
    "arange", "zeros", "ones", "full", "eye", "linspace", "tril_indices", "triu_indices", "scalar_tensor",
    "tensor", "as_tensor",
}  # fmt: skip
# Their results have the shape of a tensor and do not depend on its values. What fills them, by their arguments.
_LIKE: dict[str, Callable[[Any], Any]] = {
    "aten::zeros_like": lambda _: 0, "aten::new_zeros": lambda _: 0, "aten::ones_like": lambda _: 1,
    "aten::new_ones": lambda _: 1, "aten::full_like": operator.itemgetter(1), "aten::new_full": operator.itemgetter(2),
}  # fmt: skip
_INDEXING = {
    "aten::index": 1, "aten::_unsafe_index": 1, "aten::index_put_": 1, "aten::index_put": 1,
    "aten::_index_put_impl_": 1, "aten::_unsafe_index_put": 1,
}  # fmt: skip
# Whether values of a tensor of finite floats are so.
_OF_FINITE = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}
_INDEX_OF = {"argmax", "argmin"}
# Operators whose second result are the indices of sorted values, with the dimension that they sort.
_SORTING: dict[str, Callable[[Any], int]] = {
    "topk": lambda args: (*args[2:], -1)[0], "sort": lambda args: (*args[1:], -1)[0],
}  # fmt: skip
# Operators that draw numbers below a bound, with that bound. A choice of one of n things is `int(uniform(0, n))`.
_BOUNDS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda args: (*args[1:], 0.0, 1.0)[1], "rand": lambda _: 1.0, "rand_like": lambda _: 1.0,
    "randint": lambda args: args[1] if isinstance(args[1], int) else args[0],
}  # fmt: skip
_OVERWRITING = {"aten::zero_", "aten::fill_", "aten::copy_"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_FLAGS = frozenset({torch.bool, torch.uint8})


class _Twin(NamedTuple):
    """The values of a storage, and whether anything in them was assumed."""

    of: Any
    values: torch.UntypedStorage
    is_assumed: bool


class _Kind(NamedTuple):
    """The traits of an operator that decide how it is followed."""

    name: str
    is_view: bool
    is_random: bool
    makes_shape: bool
    written: tuple[tuple[int, str], ...]


class KnownValues:
    """The known values of tensors, by their storages: all views of a storage share them.

    Attributes:
        assumed: What was assumed where a step read a value that is not known, with the line, each once.
    """

    def __init__(self) -> None:
        self.assumed: dict[str, None] = {}
        self._twins: dict[int | None, _Twin] = {}

    def note(self, tensor: Tensor, original: Tensor) -> None:
        """Note that a tensor has the values of another, as far as these can be read."""
        values = self.of(original)
        if values is None or is_too_large(tensor):
            return
        is_assumed = self._is_assumed(original)
        with without_dispatch_modes(), torch.no_grad():
            self._know(tensor, values.to(tensor.dtype, copy=True), is_assumed=is_assumed)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values, in host memory: itself if it holds them; None if they are not known."""
        if isinstance(tensor, FakeTensor):
            if tensor.constant is not None:
                return tensor.constant
        elif tensor.device.type == "cpu" and has_readable_values(tensor):
            return tensor
        twin = self._twin(tensor)
        if twin is None or tensor.is_conj() or tensor.is_neg():
            return None
        with without_dispatch_modes():
            return torch.empty(0, dtype=tensor.dtype).set_(
                twin.values, tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values are known, without reading them."""
        return self._twin(tensor) is not None or (tensor.device.type == "cpu" and has_readable_values(tensor))

    def forget(self, tensor: Tensor) -> None:
        """Forget the values of a tensor, and of all that share its memory."""
        self._twins.pop(_key_of(tensor), None)

    def find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator whose result depends on values; NotImplemented for any other."""
        if func is LOCAL_SCALAR:
            number = self.read(args[0])
            with without_dispatch_modes():
                return number.item()
        kind = _kind_of(func)
        if kind.name in _INDEXING:
            indices = args[1]
            if all(one is None or one.dtype not in _FLAGS for one in indices):
                return NotImplemented
            out = func(args[0], list(self.without_masks(indices, _is_traced)), *args[2:], **kwargs)
            self.follow(func, args, kwargs, out)
            return out
        if kind.name == "aten::equal":
            known = [self.of(one) for one in args]
            if any(one is None for one in known):
                self._assume("two tensors are equal")
                return True
            with without_dispatch_modes():
                return torch.equal(*known)  # type: ignore[arg-type]
        return self._of_shape_by_values(func, kind, args, kwargs) if kind.makes_shape else NotImplemented

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Apply an operator to the known values, after it ran on the tensors."""
        kind = _kind_of(func)
        if kind.is_view:
            return
        tensors = given_tensors(args, kwargs)
        written = list(_written(kind, args, kwargs))
        values = [] if kind.is_random else list(self._all_of(tensors))
        if len(values) < len(tensors) or kind.is_random or (not tensors and kind.name[6:] not in _FACTORIES):
            self._follow_unknown(func, kind, args, kwargs, out)
            return
        made = list(flat(out))
        given = {storage_id(one.untyped_storage()) for one in tensors}
        new = [one for one in made if storage_id(one.untyped_storage()) not in given]
        # A real tensor that the step writes to belongs to the user, and keeps its values.
        is_followed = all(isinstance(one, FakeTensor) for one in written) and not any(map(is_too_large, new))
        found = _computed(func, args, kwargs, values) if is_followed else None
        if found is None:
            for tensor in written:
                self.forget(tensor)
            return
        is_assumed = any(map(self._is_assumed, tensors))
        for one, real in zip(made, flat(found), strict=False):
            if any(one is each for each in new) and one.shape == real.shape:
                self._know(one, real, is_assumed=is_assumed)

    def _follow_unknown(self, func: Any, kind: _Kind, args: Any, kwargs: Any, out: Any) -> None:
        """Handle an operator with unknown inputs: note what is known of its result, forget what it has written."""
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return  # gradients are finite
        for tensor in _written(kind, args, kwargs):
            self.forget(tensor)
        if kind.name[6:] in _SORTING:
            self.assume(kind.name[6:], args, out[1])
        if not isinstance(out, Tensor) or is_too_large(out):
            return
        if kind.name in _LIKE:
            self._fill(out, _LIKE[kind.name](args), is_assumed=False)
        elif kind.name in _OVERWRITING and _covers_storage(out):
            self._overwrite(out, 0 if kind.name == "aten::zero_" else args[1])
        else:
            self.assume(kind.name.removeprefix("aten::"), args, out)

    def _take_turns(self, indices: Tensor, n: int) -> None:
        """Assume that the indices run through 0 to n - 1 again and again, so that each occurs equally often."""
        with without_dispatch_modes():
            values = (torch.arange(indices.numel()) + 1).remainder(n).view(indices.shape)
        self._know(indices, values, is_assumed=True)

    def _overwrite(self, tensor: Tensor, source: Any) -> None:
        """Note the values of a tensor that is overwritten with a number, or with another tensor that is known."""
        is_assumed = isinstance(source, Tensor) and self._is_assumed(source)
        values = self.of(source) if isinstance(source, Tensor) else source
        if values is not None:
            with without_dispatch_modes(), torch.no_grad():
                made = torch.empty(tensor.shape, dtype=tensor.dtype)
                made[...] = values
            self._know(tensor, made, is_assumed=is_assumed)

    def assume(self, name: str, args: Any, out: Tensor) -> None:
        """Assume the result of a test of floats: they are finite, and a single one is 1.

        The indices of largest values are assumed to take turns: predicted classes are classes. What is sorted is
        assumed to be in order. A single random number is assumed to be just below its bound.
        """
        if name in _OF_FINITE:
            self._fill(out, _OF_FINITE[name], is_assumed=True)
        elif name in _INDEX_OF and args[0].numel():
            dim = args[1] if len(args) > 1 else None
            self._take_turns(out, args[0].numel() if dim is None else args[0].shape[dim])
        elif name in _SORTING and out.dim() and out.numel() and not is_too_large(out):
            dim = _SORTING[name](args)
            with without_dispatch_modes():
                order = torch.arange(out.shape[dim]).view(
                    [-1 if at == dim % out.dim() else 1 for at in range(out.dim())]
                )
                self._know(out, order.expand(out.shape).contiguous(), is_assumed=True)
        elif name in _BOUNDS and out.numel() == 1:
            bound = _BOUNDS[name](args)
            below = torch.finfo(out.dtype).eps * abs(bound) if out.is_floating_point() else 1
            self._fill(out, bound - below, is_assumed=True)
        if name not in _COMPARISONS or not args[0].is_floating_point():
            return
        first, second = args[:2]
        compare = getattr(operator, name)
        if second is first:
            self._fill(out, compare(1, 1), is_assumed=True)
        elif isinstance(second, float) and math.isinf(second):
            self._fill(out, compare(1.0, second), is_assumed=True)
        elif out.numel() == 1:
            values = [self.of(one) if isinstance(one, Tensor) else one for one in (first, second)]
            with without_dispatch_modes():
                found = bool(compare(*(1.0 if one is None else one for one in values)))
            self._fill(out, found, is_assumed=True)

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor's values in host memory; ones where they are not known, which is listed."""
        known = self.of(tensor)
        with without_dispatch_modes(), torch.no_grad():
            values = torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known.clone()
            if known is None or self._is_assumed(tensor):
                one = f"a value that is not known is {values.item()}" if values.numel() == 1 else ""
                self._assume(one or "values that are not known are 1")
        return values

    def without_masks(self, indices: Iterable[Any], holds_nothing: Callable[[Tensor], bool]) -> Iterator[Any]:
        """Yield indices, each mask that holds no values replaced by the indices of what it selects."""
        for one in indices:
            if isinstance(one, Tensor) and one.dtype in _FLAGS and holds_nothing(one):
                yield from self.places(one).unbind(1)
            else:
                yield one

    def places(self, mask: Tensor) -> Tensor:
        """Return the indices of what a mask selects, a row each, on the mask's device."""
        known = self.of(mask)
        if known is None:
            self._assume("a mask that is not known selects everything")
            if is_too_large(mask):
                return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device=mask.device)
            with without_dispatch_modes():
                everything = torch.ones(mask.shape, dtype=torch.bool).nonzero()
            return self.new(everything, mask, is_assumed=True)
        if self._is_assumed(mask):
            self._assume("a mask selects by what is assumed")
        with without_dispatch_modes():
            places = known.nonzero()
        return self.new(places, mask, is_assumed=self._is_assumed(mask))

    def new(self, values: Tensor, like: Tensor, *, is_assumed: bool = False) -> Tensor:
        """Return a new tensor with these values on the device of `like`."""
        made = torch.empty(values.shape, dtype=values.dtype, device=like.device)
        if not is_too_large(made):
            self._know(made, values, is_assumed=is_assumed)
        return made

    def _of_shape_by_values(self, func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator whose shape depends on values."""
        if kind.name == "aten::nonzero":
            return self.places(args[0])
        if kind.name == "aten::masked_select":
            source, mask = torch.broadcast_tensors(args[0], args[1])  # type: ignore[no-untyped-call]
            return aten.index.Tensor(source, list(self.without_masks([mask], _is_traced)))
        tensors = given_tensors(args, kwargs)
        values = list(self._all_of(tensors))
        like = tensors[0]
        found = _computed(func, args, kwargs, values) if len(values) == len(tensors) else None
        if found is None:
            largest = _largest_results(kind.name, args, kwargs)
            if not largest:
                return NotImplemented
            self._assume("values that are not known all differ")
            made = tuple(torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in largest)
            return made if len(made) > 1 else made[0]
        is_assumed = any(map(self._is_assumed, tensors))
        if is_assumed:
            self._assume("sizes follow from values that are assumed")
        return tree_map_only(Tensor, lambda one: self.new(one, like, is_assumed=is_assumed), found)

    def _all_of(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the values of tensors, up to the first that is not known."""
        for one in tensors:
            value = self.of(one)
            if value is None:
                return
            yield value

    def _twin(self, tensor: Tensor) -> _Twin | None:
        key = _key_of(tensor) if self._twins else None
        twin = self._twins.get(key)
        if twin is not None and twin.of.expired():
            del self._twins[key]
            return None
        return twin

    def _is_assumed(self, tensor: Tensor) -> bool:
        twin = self._twin(tensor)
        return twin is not None and twin.is_assumed

    def _fill(self, tensor: Tensor, value: Any, *, is_assumed: bool) -> None:
        with without_dispatch_modes():
            values = torch.empty(tensor.shape, dtype=tensor.dtype).fill_(value)
        self._know(tensor, values, is_assumed=is_assumed)

    def _know(self, tensor: Tensor, values: Tensor, *, is_assumed: bool) -> None:
        key = _key_of(tensor)
        if key is None:
            return
        storage = tensor.untyped_storage()
        with without_dispatch_modes(), torch.no_grad():
            twin = values.untyped_storage()
            if (
                values.stride() != tensor.stride()
                or values.storage_offset() != tensor.storage_offset()
                or twin.nbytes() != storage.nbytes()
            ):
                if not _covers_storage(tensor):
                    return
                twin = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
                torch.empty(0, dtype=tensor.dtype).set_(
                    twin, tensor.storage_offset(), tensor.shape, tensor.stride()
                ).copy_(values)
        if len(self._twins) >= _MANY and len(self._twins) % _MANY == 0:
            self._twins = {key: one for key, one in self._twins.items() if not one.of.expired()}
        self._twins[key] = _Twin(StorageWeakRef(storage), twin, is_assumed)  # type: ignore[no-untyped-call]

    def number(self, tensor: Tensor) -> Any:
        """Return a tensor's only value. A floating-point one that nobody computed is listed once it is compared."""
        if self.of(tensor) is not None or not tensor.is_floating_point():
            return self.read(tensor).item()
        return _AssumedFloat(1.0, lambda: self._assume("a number that is not known is 1.0"))

    def _assume(self, what: str) -> None:
        # The forward pass has assumed it before backward does; Lightning reads for its progress bar and for callbacks.
        if in_backward() or calling_package() in LIGHTNING_PACKAGES:
            return
        self.assumed.setdefault(f"{line_on_stack() or 'an unknown line'}: {what}")


class _AssumedFloat(float):
    """A number that nobody computed. Printing and summing it is harmless; a comparison is noted."""

    def __new__(cls, value: float, note: Callable[[], None]) -> Self:
        made = super().__new__(cls, value)
        made.note = note
        return made

    note: Callable[[], None]
    __hash__ = float.__hash__

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (super().__float__(),)  # a copy or a pickle is a plain number


def _noting(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(number: _AssumedFloat, *others: Any) -> Any:
        number.note()
        return operation(number, *others)

    return run


def _carrying(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(number: _AssumedFloat, *others: Any) -> Any:
        found = operation(number, *others)
        return _AssumedFloat(found, number.note) if isinstance(found, float) else found

    return run


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "trunc", "floor", "ceil"):
    setattr(_AssumedFloat, f"__{_name}__", _noting(getattr(float, f"__{_name}__")))
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs"):
    setattr(_AssumedFloat, f"__{_name}__", _carrying(getattr(float, f"__{_name}__")))


def _is_traced(_tensor: Tensor) -> bool:
    """Return True: under a FakeTensorMode a real mask selects fakes too."""
    return True


def _key_of(tensor: Tensor) -> int | None:
    """Return the id of a tensor's storage; None for one without a storage, such as a sparse tensor."""
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


_VALUES: ContextVar[KnownValues | None] = ContextVar("the known values of a traced step", default=None)


def note_values(tensor: Tensor, original: Tensor) -> None:
    """Note that a tensor has another's values, within `values_known`."""
    values = _VALUES.get()
    if values is not None:
        values.note(tensor, original)


@contextmanager
def values_known() -> Iterator[KnownValues]:
    """Follow the values of a step's tensors inside, and answer code that asks whether it is being traced with no.

    transformers makes attention masks whatever their values are if it finds fakes (`is_tracing`).
    """
    around = _VALUES.get()
    if around is not None:
        yield around
        return
    token = _VALUES.set(values := KnownValues())
    patches = Patches()
    patches.replace(Tensor, "as_subclass", _of_fakes_themselves)
    asking = sys.modules.get("transformers.masking_utils")
    if hasattr(asking, "is_tracing"):
        patches.replace(asking, "is_tracing", _asked_without_fakes)
    try:
        yield values
    finally:
        patches.undo()
        _VALUES.reset(token)


def _of_fakes_themselves(as_subclass: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an `as_subclass` that gives a fake itself: torchvision's Image is taken as its plain tensor."""
    return lambda tensor, cls: tensor if isinstance(tensor, FakeTensor) else as_subclass(tensor, cls)


def _asked_without_fakes(is_tracing: Callable[..., bool]) -> Callable[..., bool]:
    return lambda tensor=None: is_tracing(None if isinstance(tensor, FakeTensor) else tensor)


class ValueReaders(TorchFunctionMode):
    """Serves functions that read fake tensors without an operator: `numpy()`, `tolist()`, packed sequences."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values
        self._patches = Patches()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._patches.replace(*ENGINE_RUN, kept_in_backward(self))  # recomputed layers read values too
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.undo()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or read the known values."""
        if func in _PACKING and not has_readable_values(args[0]):
            return _PACKING[func](self._values, *args, **(kwargs or {}))
        if func in _READERS and isinstance(args[0], FakeTensor):
            with without_dispatch_modes():
                return _READERS[func](self._values.read(args[0]))
        return func(*args, **(kwargs or {}))


_READERS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.numpy: Tensor.numpy,
    Tensor.tolist: Tensor.tolist,
    Tensor.__array__: Tensor.numpy,
}


class _PackedSequences(torch.autograd.Function):
    """Packs sequences as torch does (PackedSequence.cpp), by lengths that are known."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, sizes: list[int], batch_first: bool) -> Tensor:
        """Return the rows of all time steps, one below the other."""
        ctx.shape, ctx.sizes, ctx.batch_first = source.shape, sizes, batch_first
        steps = source.transpose(0, 1) if batch_first else source
        parts = [
            steps[first:last, :n].contiguous().view(-1, *steps.shape[2:]) for first, last, n in _runs_of_equal(sizes)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Put each row's gradient where the row was."""
        (gradient,) = gradients
        shape = [ctx.shape[1], ctx.shape[0], *ctx.shape[2:]] if ctx.batch_first else ctx.shape
        out = gradient.new_zeros(shape)
        offset = 0
        for step, n in enumerate(ctx.sizes):
            out[step, :n].copy_(gradient[offset : offset + n])
            offset += n
        return (out.transpose(0, 1) if ctx.batch_first else out), None, None


def _runs_of_equal(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first and the last time step of each run of steps with equally many sequences, and how many."""
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


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent function that is given the sizes of packed batches with their values."""

    def run(values: KnownValues, source: Tensor, sizes: Any, *args: Any) -> Any:
        is_packed = isinstance(args[1], (list, tuple))  # the weights; otherwise they come second
        return function(source, values.read(sizes) if is_packed else sizes, *args)

    return run


# Their kernels read lengths without an operator.
_PACKING: dict[Any, Callable[..., Any]] = {
    **{one: _recurrent(one) for one in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    PACK_PADDED: _pack,
    PAD_PACKED: _pad,
}


class FollowedValues(TorchFunctionMode):
    """Follows known values above a CUDA device that computes nothing, function by function.

    A dispatch mode would see more, but torch takes other paths under one and allocates otherwise: it no longer adds
    gradients up in place, for example.
    """

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or answer it by known values."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in _NOT_FOLLOWED:
            return func(*args, **kwargs)
        values, tensors = self._values, [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        on_device = [one for one in tensors if _holds_nothing(one)]
        if on_device:
            if name == "item":
                return values.number(on_device[0])
            if name in _READS and len(tensors) == 1:
                return func(values.read(on_device[0]), *args[1:], **kwargs)
            if name in _INDEXES:
                given = args[1] if isinstance(args[1], tuple) else (args[1],)
                args = (args[0], tuple(values.without_masks(given, _holds_nothing)), *args[2:])
            elif name == "masked_select":
                source, mask = torch.broadcast_tensors(*args[:2])  # type: ignore[no-untyped-call]
                return source[tuple(values.without_masks((mask,), _holds_nothing))]
            elif name in _SHAPED_BY_VALUES and not (name == "where" and len(tensors) > 1):
                return self._shaped(func, args, kwargs, on_device[0])
        out = func(*args, **kwargs)
        if on_device or any(map(_holds_nothing, tree_leaves(out))):
            self._follow(func, args, kwargs, out)
        return out

    def _shaped(self, func: Any, args: Any, kwargs: Any, like: Tensor) -> Any:
        """Return the result of a function whose shape depends on values; ones count where they are not known."""
        args, kwargs = tree_map_only(Tensor, self._values.read, (args, kwargs))
        made = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda one: self._values.new(one, like), made)

    def _follow_unknown(self, name: str, args: Any, out: Any) -> None:
        """Forget what a function of unknown values has written, and assume the result of a test of floats."""
        if args and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            for one in tree_leaves(args[0]):  # a list where the function is one of foreach
                if isinstance(one, Tensor):
                    self._values.forget(one)
        if isinstance(out, Tensor) and _holds_nothing(out) and not is_too_large(out):
            self._values.assume(name.strip("_"), args, out)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note what is known of a function's result, and forget what it has written."""
        name, values = getattr(func, "__name__", ""), self._values
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        is_known = not _RANDOM.search(name) and all(map(values.knows, tensors))
        if not is_known or any(map(is_too_large, made)):
            self._follow_unknown(name, args, out)
            return
        if not tensors and name not in _FACTORIES:
            return
        known = [values.of(one) for one in tensors]
        found = known[0] if name in _MOVES else _computed(func, args, kwargs, known)  # type: ignore[arg-type]
        for one, real in zip(made, (each for each in tree_leaves(found) if isinstance(each, Tensor)), strict=False):
            if any(one is each for each in tensors) or one.shape != real.shape or real.is_cuda:
                continue
            if _holds_nothing(one):
                if values.of(one) is None:  # a view of what is known is known
                    values.note(one, real)
            elif any(map(_holds_nothing, tensors)):  # a copy in host memory
                with torch.no_grad():
                    one.copy_(real)


_READS = {"tolist", "__bool__", "__int__", "__float__", "__index__"}
_INDEXES = {"__getitem__", "__setitem__", "index_put", "index_put_"}
_SHAPED_BY_VALUES = {"nonzero", "argwhere", "where", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
_MOVES = {"to", "cuda", "cpu", "detach", "clone", "contiguous"}
_RANDOM = re.compile("rand|dropout|bernoulli|multinomial|normal|uniform|exponential|poisson|empty|geometric|cauchy")
_NOT_FOLLOWED = frozenset({Tensor.backward, torch.autograd.grad, torch.autograd.backward, Tensor.requires_grad_})


def _holds_nothing(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda and _computes_nothing(value.device)


_computes_nothing = cache(computes_nothing)


@cache
def _kind_of(func: Any) -> _Kind:
    if not isinstance(func, OpOverload):
        return _Kind("", is_view=False, is_random=True, makes_shape=False, written=())
    schema = operator_schema(func)
    written = tuple(
        (at, one.name)
        for at, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    makes_shape = torch.Tag.dynamic_output_shape in func.tags or schema.name == _SUPPRESSION
    is_random = torch.Tag.nondeterministic_seeded in func.tags or schema.name in _UNDEFINED
    return _Kind(
        schema.name,
        is_view=(func.is_view or schema.name == "aten::_unsafe_view") and not written and func is not LIFT_FRESH,
        is_random=is_random,
        makes_shape=makes_shape,
        written=written,
    )


# Of boxes that overlap, the best ones; torchvision's own tags do not say that its result has a shape by values.
_SUPPRESSION = "torchvision::nms"
# Their results have no values yet, or none that a twin could have.
_UNDEFINED = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_like",
              "aten::resize_", "aten::set_"}  # fmt: skip


def _written(kind: _Kind, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for at, name in kind.written:
        given = args[at] if at < len(args) else kwargs.get(name)
        yield from flat(given)


def _computed(func: Any, args: Any, kwargs: Any, values: Sequence[Tensor]) -> Any:
    """Return the result of an operator on values; None where the host has no kernel for it, or it fails."""
    on_host = iter(values)
    args, kwargs = tree_map_only(Tensor, lambda _: next(on_host), (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    try:
        with without_dispatch_modes(), torch.no_grad():
            return func(*args, **kwargs)
    except Exception:  # noqa: BLE001, the operator itself raises what the user is to see
        return None


def is_too_large(tensor: Tensor) -> bool:
    """Return whether a tensor is so large that its values are not followed."""
    return tensor.numel() > (_MOST_FLOATS if tensor.is_floating_point() or tensor.is_complex() else _MOST_INTEGERS)


def _covers_storage(tensor: Tensor) -> bool:
    """Return whether each element of a tensor's storage is one of the tensor's, once."""
    is_expanded = any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not is_expanded and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _largest_results(name: str, args: Any, kwargs: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the largest shape that each result of an operator can have, and its type; empty if there is no largest."""
    given = args[0]
    n, integers = given.numel(), torch.int64
    if name in {"aten::_unique2", "aten::unique_consecutive"}:
        return [((n,), given.dtype), (tuple(given.shape), integers), ((n,), integers)]
    if name in {"aten::unique_dim", "aten::unique_dim_consecutive"}:
        rows = given.shape[args[1]]
        return [(tuple(given.shape), given.dtype), ((rows,), integers), ((rows,), integers)]
    if name == _SUPPRESSION:
        return [((given.shape[0],), integers)]
    if name == "aten::repeat_interleave":
        return [((kwargs.get("output_size") or n,), integers)]
    if name == "aten::bincount":
        return [((kwargs.get("minlength") or 1,), integers)]
    return []
