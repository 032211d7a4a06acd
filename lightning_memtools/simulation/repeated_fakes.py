"""Makes the results of operators on fake tensors without asking a FakeTensorMode for the same shapes twice.

A FakeTensorMode takes 300 microseconds for an operator, most of them to look it up in its own cache and to wrap the
result with the means of the compiler's front end. Models repeat the same operators on the same shapes in each of their
layers, and steps are traced several times, so what is known is kept for the whole process.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_memtools._torch import (
    LIFT_FRESH,
    LOCAL_SCALAR,
    FakeMaker,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    has_kernel,
    kernels_of_meta_tensors,
    operator_schema,
    storage_id,
    suggest_memory_format,
    without_torch_dispatch,
)
from lightning_memtools.memory.cuda_ops.rules import span
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.simulation.known_values import KnownValues

Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""The shape, strides, type and device of a new tensor."""

Known = Literal["the first argument"] | tuple[bool, list[Made | None]] | None
"""The result of an operator: its first argument, or whether it is a single tensor, and each tensor; None for others."""

_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
# The shapes of their results depend on values.
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Kernels of normalizations (layer_norm.cpp, cuda/layer_norm_kernel.cu, Normalization.cpp) return contiguous results,
# unlike the FakeTensorMode where their first arguments are strided. How many these are.
_CONTIGUOUS = {
    torch.ops.aten.native_layer_norm_backward.default: 2,
    torch.ops.aten.native_batch_norm.default: 1,
    torch.ops.aten.native_batch_norm_backward.default: 2,
}
# By operator and all that its result depends on. A model has some hundreds.
_known: dict[Any, Known] = {}
_MOST_KNOWN = 50_000
_IMAGES = 4  # the dimensions of images


class RepeatedFakes:
    """Runs operators on fake tensors: a repeated call gets a fake result with the shape cached from an earlier call.

    It caches operators that return new tensors or change only their first argument. Operators that change other
    arguments or depend on values are left to the FakeTensorMode. A VirtualDevice calls `run`.

    Args:
        fake_mode: The FakeTensorMode, which is active.
        values: The known values of fake tensors, which each call updates.
    """

    def __init__(self, fake_mode: FakeTensorMode, values: KnownValues) -> None:
        self._fake_mode = fake_mode
        self._values = values
        self._fake = FakeMaker(fake_mode)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an operator's result for these arguments."""
        if _is_foreach_in_place(func) and args[0] and _note(args[0][0], []):
            return None  # without effect on fakes, but for counters of steps: this halves the time of optimizers' steps
        if args and not kwargs and (number := self._of_number(func, *args)) is not None:
            return number
        found = self._values.find(func, args, kwargs)
        if found is not NotImplemented:
            return found
        if _is_view(func) and _note(args[0], []):
            return self._view(func, args, kwargs)
        if (n := _CONTIGUOUS.get(func)) is not None:
            args = (*map(self._contiguous, args[:n]), *args[n:])
        key = _key(func, args, kwargs) if _is_repeatable(func) else None
        # Looked up once: another thread may forget all at any time.
        known = None if key is None else _known.get(key)
        if known is None:
            out = func(*args, **kwargs)
            if key is not None:
                _remember(key, _described(out, args, kwargs))
        elif known == "the first argument":
            out = args[0]
        else:
            is_one, described = known
            made = [None if one is None else self._make(*one) for one in described]
            out = made[0] if is_one else tuple(made)
        if not args or out is not args[0]:
            out = self._laid_out(func, out)
        self._values.follow_operator(func, args, kwargs, out)
        return out

    def _laid_out(self, func: Any, out: Any) -> Any:
        """Return the result `out` of an operator: contiguous if the operator is elementwise and images have one pixel.

        Real kernels return such images contiguous (TensorIterator.cpp). If they had channels-last strides, an
        operator that enlarges them would also return a channels-last tensor.
        """
        if type(out) is not FakeTensor or out.dim() != _IMAGES or torch.Tag.pointwise not in getattr(func, "tags", ()):
            return out
        n_samples, n_channels, *size = out.shape
        stride = (n_channels, 1, 1, 1)
        if size != [1, 1] or n_channels == 1 or out.stride() == stride or out.requires_grad:
            return out
        return self._make((n_samples, n_channels, 1, 1), stride, out.dtype, out.fake_device)

    def _of_number(self, func: Any, first: Any, *others: Any) -> Any:
        """Return the result of an operator whose first argument is a scalar tensor with a known value; otherwise None.

        Optimizers count their steps in such tensors, one for each parameter. Without this shortcut, counting would
        often take longer than the rest of the step.
        """
        if func is LIFT_FRESH:
            is_number = type(first) is Tensor and first.shape == () and first.is_cpu and not first.requires_grad
            return self._fake.number(first) if is_number else None
        if type(first) is not FakeTensor or first.constant is None:
            return None
        if func is LOCAL_SCALAR:
            with without_torch_dispatch():
                return first.constant.item()
        if _is_repeatable(func) and operator_schema(func).is_mutable and {int, float}.issuperset(map(type, others)):
            with without_torch_dispatch():
                func(first.constant, *others)
            return first
        return None

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A fake is a meta tensor underneath, whose kernels for views take a few microseconds.
        with kernels_of_meta_tensors(self._fake_mode):
            out = func(*args, **kwargs)
            device = args[0].fake_device
            return self._fake(out, device) if isinstance(out, Tensor) else [self._fake(one, device) for one in out]

    def _make(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        # The FakeTensorMode would make a fake of this one too.
        with without_torch_dispatch():
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return self._fake(empty, device)

    def _contiguous(self, one: Tensor) -> Tensor:
        kept = suggest_memory_format(one)
        if type(one) is not FakeTensor or one.is_contiguous(memory_format=kept):
            return one
        with without_torch_dispatch():
            made = torch.empty(one.shape, dtype=one.dtype, device="meta", memory_format=kept)
            return self._fake(made, one.fake_device)


def _remember(key: Any, known: Known) -> None:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = known


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a cache key with everything that an operator's result depends on; None if the call cannot be cached."""
    found: list[Any] = [func, torch.get_default_dtype()]
    if not all(_note(one, found) for one in args):
        return None
    for name, value in kwargs.items():
        found.append(name)
        if not _note(value, found):
            return None
    return tuple(found)


@cache
def _is_foreach_in_place(func: Any) -> bool:
    """Return whether an operator does nothing but change each tensor of a list."""
    if not isinstance(func, OpOverload):
        return False
    schema = operator_schema(func)
    return schema.name.startswith("aten::_foreach_") and not schema.returns


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operator always returns views of its first argument."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    # `contiguous`, `reshape` and others that are made of several operators promise a view, but may copy.
    schema = operator_schema(func)
    if has_kernel(f"{schema.name}.{schema.overload_name}".rstrip("."), "CompositeImplicitAutograd"):
        return False
    return func.is_view or schema.name == "aten::_unsafe_view"  # whose schema promises a new tensor


@cache
def _is_repeatable(func: Any) -> bool:
    """Return whether an operator either returns only new tensors, or only changes its first argument and returns it.

    The shapes of the results must also follow from the shapes of the arguments.
    """
    if not isinstance(func, OpOverload) or func.namespace != "aten" or not _BY_VALUE.isdisjoint(func.tags):
        return False
    schema = operator_schema(func)
    if not schema.returns or not all(isinstance(one.type, torch.TensorType) for one in schema.returns):
        return False
    if not schema.is_mutable:
        return all(one.alias_info is None for one in schema.returns)
    written = [at for at, one in enumerate(schema.arguments) if one.alias_info is not None]
    return written == [0] and len(schema.returns) == 1 and torch.Tag.inplace_view not in func.tags


def _note(value: Any, found: list[Any]) -> bool:
    """Append an argument's properties, such as its shape, to `found`. Return False if it cannot be cached."""
    kind = type(value)
    if kind is FakeTensor:
        found += (value.shape, value.stride(), value.dtype, value.fake_device)
        return value.constant is None and value.layout is torch.strided and not (value.is_conj() or value.is_neg())
    if kind in {list, tuple}:
        found.append(len(value))
        return all(_note(one, found) for one in value)
    found += (kind, value)  # the type because 1, 1.0 and True are equal
    return kind in _PLAIN


def _described(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known:
    """Describe a result so that it can be made again. Return None unless it is `args[0]` or new dense tensors."""
    if args and out is args[0]:
        return "the first argument"
    results: list[Any] = [out] if isinstance(out, Tensor) else list(out)
    tensors = [one for one in results if one is not None]
    if not all(type(one) is FakeTensor and one.constant is None and _is_dense(one) for one in tensors):
        return None
    new = {storage_id(one.untyped_storage()) for one in tensors}
    given = {storage_id(one.untyped_storage()) for one in tensors_in((args, kwargs))}
    if len(new) < len(tensors) or new & given:
        return None
    made = [None if one is None else (tuple(one.shape), one.stride(), one.dtype, one.fake_device) for one in results]
    return results[0] is out, made


def _is_dense(one: Tensor) -> bool:
    """Return whether `torch.empty_strided` could create a tensor like this from its shape and strides alone."""
    if one.layout is not torch.strided or one.storage_offset() or one.is_conj() or one.is_neg():
        return False
    return one.untyped_storage().nbytes() == span(one) * one.element_size()
