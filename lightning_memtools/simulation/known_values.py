"""Knows the values of a step's data, and what is computed from them alone, beside tensors without values.

A traced step has sizes and no values: its tensors are fakes, or lie on a CUDA device that computes nothing. But the
batch is known, and so are a model's buffers. So a tensor whose values are known has a twin in host memory, and each
operator on known tensors alone is computed on their twins too. `int(batch.max())`, `x[mask]`, `repeat_interleave` and
packed sequences then have the sizes of the real step.

What depends on values that nobody computed is assumed: a mask selects everything, and a number is 1. So floats are
finite, and a flag is set. Each such read is listed with its line (`KnownValues.assumed`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memtools._torch import (
    LIFT_FRESH,
    FakeTensor,
    OpOverload,
    StorageWeakRef,
    has_readable_values,
    in_backward,
    operator_schema,
    storage_id,
    tree_map_only,
    without_dispatch_modes,
)
from lightning_memtools.memory.user_code import PASSING_PACKAGES, calling_package, line_on_stack
from lightning_memtools.memory.virtual.patches import Patches
from lightning_memtools.memory.virtual.storages import flat, given_tensors

aten = torch.ops.aten

_MOST_INTEGERS = 2**22
_MOST_FLOATS = 2**18
_MANY = 1024  # entries, after which those of tensors that are gone are removed
_FLAGS = frozenset({torch.bool, torch.uint8})


class _Twin(NamedTuple):
    """The values of a fake tensor's storage, kept in host memory, and whether any of these values were assumed."""

    of: Any
    values: torch.UntypedStorage
    is_assumed: bool


class FollowedCall(NamedTuple):
    """A call of a torch operator or function on fake tensors. Repeating the call on real tensors gives the values.

    Attributes:
        name: The name without a namespace: "index" for an operator, "__getitem__" for a function.
        holds_nothing: Returns whether a tensor has no data, as is the case for fake tensors.
        written: The tensors that the call writes to.
        is_followed: True if the call can be repeated: it is not random, and does not write to the user's own tensors.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    holds_nothing: Callable[[Tensor], bool]
    written: Sequence[Tensor] = ()
    is_followed: bool = True


class KnownValues:
    """Keeps the known values of tensors without data, such as fakes, in host memory. Views share their values.

    Attributes:
        assumed: For each assumption about unknown values ("line of code: assumption"), how many times it was made.
    """

    def __init__(self) -> None:
        self.assumed: dict[str, int] = {}
        self._twins: dict[int | None, _Twin] = {}

    def note(self, tensor: Tensor, original: Tensor) -> None:
        """Store the values of `original`, if they are known, as the values of `tensor`."""
        values = self.of(original)
        if values is None or is_too_large(tensor):
            return
        with without_dispatch_modes(), torch.no_grad():
            self.know(tensor, values.to(tensor.dtype, copy=True), is_assumed=self.is_assumed(original))

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor in host memory with the values of `tensor` (maybe `tensor` itself); None if unknown."""
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

    def is_assumed(self, tensor: Tensor) -> bool:
        """Return True if a tensor's values were assumed, or were computed from assumed values."""
        twin = self._twin(tensor)
        return twin is not None and twin.is_assumed

    def find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator that has to read tensor values; NotImplemented for other operators."""
        name = name_of(func)
        answer = RULES.get(name)
        if answer is None:
            return NotImplemented
        # Under a FakeTensorMode a real mask selects fakes too.
        return answer(self, FollowedCall(name, func, args, kwargs, torch.is_tensor))

    def follow_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Repeat an operator's call with real tensors in place of fakes, to find the values of its result `out`."""
        is_view, is_random, places = _kind_of(func)
        if is_view or func is aten._amp_foreach_non_finite_check_and_unscale_.default:  # gradients are finite
            return
        name = name_of(func)
        is_given = args and isinstance(args[0], Tensor) and name not in _OF_ONES and name not in _OVERWRITING
        if not places and (name in _UNDEFINED or (is_given and self.of(args[0]) is None)):
            return  # as nearly all: nothing is written, and nothing known
        written = [one for at, key in places for one in flat(args[at] if at < len(args) else kwargs.get(key))]
        # A real tensor that the step writes to belongs to the user, and keeps its values.
        is_followed = not is_random and all(isinstance(tensor, FakeTensor) for tensor in written)
        self.follow(FollowedCall(name, func, args, kwargs, torch.is_tensor, written, is_followed), out)

    def follow(self, call: FollowedCall, out: Any) -> None:
        """Repeat a call with real tensors in place of its fake arguments, to find the values of its result `out`."""
        tensors, made = given_tensors(call.args, call.kwargs), list(flat(out))
        values = [self.of(tensor) for tensor in tensors]
        is_guess = call.name in _OF_ONES and any(value is None for value in values)
        kept = {_key_of(tensor) for tensor, value in zip(tensors, values, strict=True) if value is not None}
        new = [_key_of(tensor) not in kept for tensor in made]
        is_small = not any(is_new and is_too_large(tensor) for tensor, is_new in zip(made, new, strict=True))
        computed = None
        if call.is_followed and is_small and (tensors or call.name in FACTORIES):
            computed = _computed(call, tensors, values, made)
        if computed is None:
            for tensor in call.written:
                self._twins.pop(_key_of(tensor), None)
            return
        is_assumed = is_guess or any(map(self.is_assumed, tensors))
        for tensor, real, is_new in zip(made, flat(computed), new, strict=False):
            # Of what is assumed, only flags and indices are kept: a mask made of numbers selects everything.
            if not is_new or tensor.shape != real.shape or real.is_cuda or (is_guess and real.is_floating_point()):
                continue
            if call.holds_nothing(tensor):
                self.know(tensor, real, is_assumed=is_assumed)
            elif any(map(call.holds_nothing, tensors)):  # a copy in host memory
                with torch.no_grad():
                    tensor.copy_(real)

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor's values in host memory. Unknown values are assumed to be 1; see `assumed`."""
        known = self.of(tensor)
        with without_dispatch_modes(), torch.no_grad():
            values = torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known.clone()
            if known is None or self.is_assumed(tensor):
                number = f"a value that is not known is {values.item()}" if values.numel() == 1 else ""
                # `while bad.any(): draw again` would never end: after so many reads in a line, assume the opposite.
                if self.assume(number or "values that are not known are 1") > 1000 and number:  # noqa: PLR2004
                    values.logical_not_()
        return values

    def without_masks(self, indices: Iterable[Any], holds_nothing: Callable[[Tensor], bool]) -> Iterator[Any]:
        """Yield `indices`, but in place of a mask for which `holds_nothing` is True, the indices that it selects."""
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in _FLAGS and holds_nothing(index):
                yield from self.places(index).unbind(1)
            else:
                yield index

    def places(self, mask: Tensor) -> Tensor:
        """Return the positions that a mask selects, one per row. If its values are unknown, all count as True."""
        known = self.of(mask)
        is_assumed = known is None or self.is_assumed(mask)
        if is_assumed:
            everything = "a mask that is not known selects everything"
            self.assume(everything if known is None else "a mask selects by what is assumed")
        if known is None and is_too_large(mask):
            return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device=mask.device)
        with without_dispatch_modes():
            places = (_ones(mask) if known is None else known).nonzero()
        return self.new(places, mask, is_assumed=is_assumed)

    def new(self, values: Tensor, like: Tensor, *, is_assumed: bool = False) -> Tensor:
        """Return a new tensor on the device of `like`, and store `values` as its known values."""
        made = torch.empty(values.shape, dtype=values.dtype, device=like.device)
        if not is_too_large(made):
            self.know(made, values, is_assumed=is_assumed)
        return made

    def know(self, tensor: Tensor, values: Tensor, *, is_assumed: bool) -> None:
        """Store the known values of a tensor. They are copied only if their memory layout differs from the tensor's."""
        key = _key_of(tensor)
        if key is None:
            return
        storage = tensor.untyped_storage()
        with without_dispatch_modes(), torch.no_grad():
            values = values.to(tensor.dtype)
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

    def assume(self, what: str) -> int:
        """Count the assumption `what` for the line of code being executed, and return its count for that line."""
        # The forward pass has assumed it before backward does; Lightning and torchmetrics read to show and to check.
        if in_backward() or calling_package() in PASSING_PACKAGES:
            return 0
        text = f"{line_on_stack() or 'an unknown line'}: {what}"
        self.assumed[text] = self.assumed.get(text, 0) + 1
        return self.assumed[text]

    def _twin(self, tensor: Tensor) -> _Twin | None:
        key = _key_of(tensor) if self._twins else None
        twin = self._twins.get(key)
        if twin is not None and twin.of.expired():
            del self._twins[key]
            return None
        return twin


# What calls need values for.


def _read(values: KnownValues, call: FollowedCall) -> Any:
    """Return the result of a call, such as `item()`, that reads the values of its first argument."""
    known = values.read(call.args[0])
    with without_dispatch_modes():
        return call.func(known, *call.args[1:], **call.kwargs)


def _indexed(values: KnownValues, call: FollowedCall) -> Any:
    source, given, *others = call.args
    indices = given if isinstance(given, (list, tuple)) else (given,)
    is_mask = [isinstance(one, Tensor) and one.dtype in _FLAGS and call.holds_nothing(one) for one in indices]
    # What a single mask fills with a number is written by `masked_fill`, which reads no values.
    if not any(is_mask) or (call.name == "__setitem__" and len(indices) == 1 and _is_number(others[0])):
        return NotImplemented
    selected = values.without_masks(indices, call.holds_nothing)
    of_operator = isinstance(call.func, OpOverload)
    args = (source, list(selected) if of_operator else tuple(selected), *others)
    out = call.func(*args, **call.kwargs)
    if of_operator:
        values.follow_operator(call.func, call.args, call.kwargs, out)
    return out


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.numel() == 1 and value.is_cpu and not isinstance(value, FakeTensor))


def _nonzero(values: KnownValues, call: FollowedCall) -> Any:
    if len(given_tensors(call.args, call.kwargs)) > 1:  # `where` that chooses between two tensors
        return NotImplemented
    places = values.places(call.args[0])
    as_tuple = call.name == "where" or call.kwargs.get("as_tuple", False)
    return tuple(places.unbind(1)) if as_tuple else places


def _masked_select(values: KnownValues, call: FollowedCall) -> Any:
    source, mask = torch.broadcast_tensors(*call.args[:2])  # type: ignore[no-untyped-call]
    selected = values.without_masks([mask], call.holds_nothing)
    return aten.index.Tensor(source, list(selected)) if isinstance(call.func, OpOverload) else source[tuple(selected)]


def _shaped(stand_in: Callable[[Tensor], Tensor], what: str, values: KnownValues, call: FollowedCall) -> Any:
    """Return the result of a call whose output shape depends on the values of its arguments.

    If the values are unknown, `stand_in` makes them up, and `what` is reported as an assumption.
    """
    tensors = given_tensors(call.args, call.kwargs)
    real = [one for one in map(values.of, tensors) if one is not None]
    is_known = len(real) == len(tensors)
    is_assumed = not is_known or any(map(values.is_assumed, tensors))
    if is_assumed:
        values.assume("sizes follow from values that are assumed" if is_known else what)
    if not is_known:
        with without_dispatch_modes():
            real = [stand_in(tensors[0]), *map(_ones, tensors[1:])]
    result = on_host(call.func, call.args, call.kwargs, real)
    if result is None:
        return NotImplemented
    return tree_map_only(Tensor, lambda one: values.new(one, tensors[0], is_assumed=is_assumed), result)


def _repeated(values: KnownValues, call: FollowedCall) -> Any:
    """Run `repeat_interleave` with the number of output rows, so that torch does not read `repeats`, which is fake."""
    args = call.args
    if len(args) == 1 and isinstance(args[0], Tensor):
        return _shaped(_ones, "each row is repeated once", values, call)
    repeats = args[1] if len(args) > 1 else call.kwargs.get("repeats")
    if not isinstance(repeats, Tensor) or call.kwargs.get("output_size") or isinstance(call.func, OpOverload):
        return NotImplemented
    n_rows = int(values.read(repeats).sum()) if repeats.numel() > 1 else NotImplemented
    return n_rows if n_rows is NotImplemented else call.func(*args, **call.kwargs, output_size=n_rows)


def _ctc_loss(values: KnownValues, call: FollowedCall) -> Any:
    """Return the losses of ctc_loss, and its log-alpha table, whose width follows from the longest target."""
    log_probs, lengths = call.args[0], call.args[3]
    known = values.read(lengths) if isinstance(lengths, Tensor) else lengths
    with without_dispatch_modes():
        longest = max(map(int, known))
    n_steps, n_sequences, _ = log_probs.shape
    return log_probs.new_empty([n_sequences]), log_probs.new_empty([n_sequences, n_steps, 2 * longest + 1])


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _all_differ(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel()).to(tensor.dtype).view(tensor.shape)


def _drawn(values: KnownValues, call: FollowedCall) -> Any:
    """Run `uniform_`. Assume a single number to be just below its bound, so that `int(x.uniform_(0, n))` is below n."""
    drawn, *bounds = call.args
    if drawn.numel() != 1 or values.of(drawn) is drawn:  # a real tensor keeps what is drawn
        return NotImplemented
    high = bounds[1] if len(bounds) > 1 else call.kwargs.get("to", 1.0)
    out = call.func(*call.args, **call.kwargs)
    known = values.of(out)
    with without_dispatch_modes(), torch.no_grad():
        real = (_ones(out) if known is None else known).fill_(high - torch.finfo(out.dtype).eps * abs(high))
    values.know(out, real, is_assumed=True)
    return out


def _succeeds(values: KnownValues, call: FollowedCall) -> Any:
    """Run a factorization. Assume that it succeeds: its last result, which says where it failed, is 0."""
    out = call.func(*call.args, **call.kwargs)
    if values.of(out[-1]) is None:
        with without_dispatch_modes():
            zeros = torch.zeros(out[-1].shape, dtype=out[-1].dtype)
        values.know(out[-1], zeros, is_assumed=True)
    return out


# What is computed of values that are not known.

_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_OF_ONES = _COMPARISONS | {"isnan", "isinf", "isposinf", "isneginf", "isfinite", "argmax", "argmin", "topk", "sort"}
_ZEROS = {"zeros_like", "new_zeros", "zero_"}
# Whatever their first argument holds.
_OVERWRITING = _ZEROS | {"ones_like", "new_ones", "full_like", "new_full", "fill_", "copy_"}


def _computed(
    call: FollowedCall, tensors: Sequence[Tensor], values: Sequence[Tensor | None], made: Sequence[Tensor]
) -> Any:
    """Return a call's result, computed on the CPU; None if it is not known.

    Args:
        call: The call.
        tensors: The tensors among the call's arguments.
        values: The values of each of these; None if they are not known. They count as ones where that is assumed.
        made: The tensors of the result, which have no values.
    """
    if any(value is None for value in values):
        if call.name in _ZEROS and made[0].numel():
            # Unlike torch.zeros it writes nothing: the zeros of an optimizer's state take no time and no memory.
            with without_dispatch_modes():
                return torch.from_numpy(np.zeros(made[0].nbytes, np.uint8)).view(made[0].dtype).view(made[0].shape)
        overwrites = call.name in _OVERWRITING and all(value is not None for value in values[1:])
        if not overwrites and (not _is_of_ones(call, made) or any(one.numel() > _MOST_INTEGERS for one in tensors)):
            return None
    with without_dispatch_modes():
        ones = _ones if call.written else lambda one: torch.ones((), dtype=one.dtype).expand(one.shape)
        given = [ones(tensor) if value is None else value for tensor, value in zip(tensors, values, strict=True)]
    return on_host(call.func, call.args, call.kwargs, given)


def _is_of_ones(call: FollowedCall, made: Sequence[Tensor]) -> bool:
    """Return whether a call's result is assumed to be that of ones.

    A comparison counts if it compares floats with themselves or with infinity, or if it has a single result.
    """
    if call.name not in _COMPARISONS:
        return call.name in _OF_ONES
    first, second = call.args[:2]
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return False
    return second is first or made[0].numel() == 1 or (isinstance(second, float) and math.isinf(second))


_DIFFER = partial(_shaped, _all_differ, "values that are not known all differ")
RULES: dict[str, Callable[[KnownValues, FollowedCall], Any]] = {
    **dict.fromkeys(("internal local_scalar_dense", "item", "tolist", "numpy"), _read),
    **dict.fromkeys(("__array__", "__bool__", "__int__", "__float__", "__index__"), _read),
    **dict.fromkeys(("index", "internal unsafe_index", "index_put", "index_put_", "__getitem__"), _indexed),
    **dict.fromkeys(("internal index_put_impl_", "internal unsafe_index_put", "__setitem__"), _indexed),
    **dict.fromkeys(("nonzero", "argwhere", "where"), _nonzero),
    "masked_select": _masked_select,
    **dict.fromkeys(("equal", "allclose"), partial(_shaped, _ones, "two tensors are equal")),
    **dict.fromkeys(("unique", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _DIFFER),
    "internal unique2": _DIFFER,
    "bincount": partial(_shaped, _ones, "numbers that are counted are 1"),
    "repeat_interleave": _repeated,
    "internal ctc_loss": _ctc_loss,
    "internal ctc_loss_backward": lambda _values, call: torch.empty_like(call.args[1]),
    "uniform_": _drawn,
    **dict.fromkeys(("linalg_cholesky_ex", "linalg_inv_ex", "linalg_lu_factor_ex", "linalg_solve_ex"), _succeeds),
    # Of boxes that overlap, the best ones. Boxes whose corners all differ are apart.
    "nms": partial(_shaped, _all_differ, "no boxes overlap"),
}
"""Every call that needs values that its tensors do not hold, by its name."""

FACTORIES = {
    "arange", "zeros", "ones", "full", "eye", "linspace", "tril_indices", "triu_indices", "scalar_tensor",
    "tensor", "as_tensor",
}  # fmt: skip
"""Functions and operators that make tensors of their arguments alone."""


@cache
def name_of(func: Any) -> str:
    """Return the name of an operator or function without its namespace. An operator "_x" is named "internal x"."""
    if not isinstance(func, OpOverload):
        return str(func.__name__)
    name: str = operator_schema(func).name.rpartition("::")[2]
    return f"internal {name.lstrip('_')}" if name.startswith("_") else name


# Their results have no values yet, or none that a twin could have.
_UNDEFINED = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "resize_", "set_"}


@cache
def _kind_of(func: Any) -> tuple[bool, bool, tuple[tuple[int, str], ...]]:
    """Return whether an operator makes views, whether its result is random or uninitialized, and what it writes to."""
    if not isinstance(func, OpOverload):
        return False, True, ()
    schema = operator_schema(func)
    written = tuple(
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    is_view = (func.is_view or schema.name == "aten::_unsafe_view") and not written and func is not LIFT_FRESH
    is_random = torch.Tag.nondeterministic_seeded in func.tags or name_of(func) in _UNDEFINED
    return is_view, is_random, written


_MOVES = {"to", "cuda", "cpu", "detach", "clone", "contiguous"}  # functions; the result may have another type


def on_host(func: Any, args: Any, kwargs: Any, values: Sequence[Tensor]) -> Any:
    """Run a call on the CPU, with the tensors `values` in place of its own. Return the result; None if it raises."""
    given = iter(values)
    with without_dispatch_modes(), torch.no_grad():
        if getattr(func, "__name__", "") in _MOVES:
            return values[0].clone()
        args, kwargs = tree_map_only(Tensor, lambda _: next(given), (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        try:
            return func(*args, **kwargs)
        except Exception:  # noqa: BLE001, the operator itself raises what the user is to see
            return None


def is_too_large(tensor: Tensor) -> bool:
    """Return whether a tensor is so large that its values are not tracked."""
    return tensor.numel() > (_MOST_FLOATS if tensor.is_floating_point() or tensor.is_complex() else _MOST_INTEGERS)


def _covers_storage(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its storage completely, with no two at the same address."""
    is_expanded = any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not is_expanded and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _key_of(tensor: Tensor) -> int | None:
    """Return the id of a tensor's storage; None for a tensor without a storage, such as a sparse one."""
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


_VALUES: ContextVar[KnownValues | None] = ContextVar("the known values of a traced step", default=None)


def note_values(tensor: Tensor, original: Tensor) -> None:
    """Store the known values of `original` as those of `tensor`. Outside of `values_known`, do nothing."""
    values = _VALUES.get()
    if values is not None:
        values.note(tensor, original)


@contextmanager
def values_known() -> Iterator[KnownValues]:
    """Context manager: track the known values of a step's tensors, and yield them as `KnownValues`.

    Within the context, transformers takes fakes for ordinary tensors, so that its models run as in a real step.
    """
    around = _VALUES.get()
    if around is not None:
        yield around
        return
    token = _VALUES.set(values := KnownValues())
    patches = Patches()
    patches.replace(Tensor, "as_subclass", _of_fakes_themselves)
    asked = sys.modules.get("transformers.utils.import_utils")
    if hasattr(asked, "is_fake_tensor"):  # through which its `is_tracing` asks, whoever has imported that
        patches.replace(asked, "is_fake_tensor", lambda _original: lambda _tensor: False)
    try:
        yield values
    finally:
        patches.undo()
        _VALUES.reset(token)


def _of_fakes_themselves(as_subclass: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `as_subclass` to return fake tensors unchanged, so that they do not become, say, torchvision Images."""
    return lambda tensor, cls: tensor if isinstance(tensor, FakeTensor) else as_subclass(tensor, cls)
