"""Lets transformers decide about attention masks by their values where tensors have none, as it does in a real step.

It leaves out a mask of ones and asks whether sequences are packed. On fake tensors it does not ask, and a device that
computes nothing answers zero: a mask would be made, which has an element for every pair of words, and attention with
one takes other kernels. So the values that tensors of a batch had on the host are kept, and followed through the
functions that ask. What is not known, such as a mask that was computed on the device, counts as ones, not packed.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import (
    LOCAL_SCALAR,
    FakeTensor,
    OperatorMode,
    has_readable_values,
    in_backward,
    tree_leaves,
    tree_map_only,
    without_dispatch_modes,
)
from lightning_memtools.memory.owned import storage_of
from lightning_memtools.null_cuda.launch import computes_nothing

ASKING = "transformers.masking_utils"
"""The module that asks; the older one beside it served models before transformers 5."""
_MODULES = (ASKING, "transformers.modeling_attn_mask_utils")
# Both call this before they read values; it is true of fake tensors.
_IS_TRACING = "is_tracing"
# What calls one of these asks too, or prepares what is asked about.
_ASKED = {_IS_TRACING, "find_packed_sequence_indices"}
_PREPARES = "prepare_padding_mask"
_MOST_ELEMENTS = 2**20


class HostValues:
    """The values that small tensors of whole numbers and flags had on the host, for as long as the tensors live."""

    def __init__(self) -> None:
        # By the storage: the tensor that was noted, its values, and where in the storage it begins.
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor, int]] = {}

    def note(self, tensor: Tensor, original: Tensor) -> None:
        """Keep the values of the tensor that this one was copied from."""
        if original.is_floating_point() or original.numel() > _MOST_ELEMENTS:
            return
        values = self.read(original)
        if values is original:
            with without_dispatch_modes():
                values = original.detach().to("cpu", copy=True)
        storage = storage_of(tensor)
        if values is not None and storage is not None and values.stride() == tensor.stride():
            key = storage[0]
            forget = weakref.ref(tensor, lambda _: self._known.pop(key, None))
            self._known[key] = forget, values, int(tensor.storage_offset())

    def read(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor as `of` does, and itself where it holds its own; None if they are not known."""
        known = self.of(tensor)
        is_own = known is None and has_readable_values(tensor) and not computes_nothing(tensor.device)
        return tensor if is_own else known

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor or of a part of it; None if they are not known."""
        storage = storage_of(tensor)
        found = None if storage is None else self._known.get(storage[0])
        if found is None or found[1].dtype is not tensor.dtype:
            return None
        _, values, begin = found
        offset = tensor.storage_offset() - begin
        last = offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if offset < 0 or last >= values.numel():
            return None
        with without_dispatch_modes():
            return values.as_strided(tensor.shape, tensor.stride(), offset)

    def change(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do to known values what an operator does to its first argument; where it takes unknown ones, forget them."""
        tensor, *others = args
        storage = storage_of(tensor)
        found = None if storage is None else self._known.get(storage[0])
        if storage is None or found is None:
            return
        reference, values, begin = self._known.pop(storage[0])
        given = [one for one in tree_leaves((others, kwargs)) if isinstance(one, Tensor)]
        known = [
            one.constant if isinstance(one, FakeTensor) and one.constant is not None else self.read(one)
            for one in given
        ]
        if any(one is None for one in known):
            return
        with without_dispatch_modes():
            values = values.clone()  # others may have been noted with the same
        self._known[storage[0]] = reference, values, begin
        own = self.of(tensor)
        if own is None:
            del self._known[storage[0]]
            return
        on_host = iter(known)
        others, kwargs = tree_map_only(Tensor, lambda _: next(on_host), (others, kwargs))
        with without_dispatch_modes():
            operator(own, *others, **kwargs)


_VALUES: ContextVar[HostValues | None] = ContextVar("values of the batch", default=None)


class _Answers:
    """Functions of transformers that are replaced for all threads: the first one replaces, the last one restores.

    Attributes:
        lock: Held while functions are replaced or restored.
        askers: The values of each thread that is within.
        replaced: The variables of a module and the name of one, with its value before.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.askers: list[HostValues] = []
        self.replaced: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}

    def values(self) -> HostValues | None:
        """Return the values that this thread knows; in backward, which may have a thread of its own, another's."""
        own = _VALUES.get()
        return self.askers[-1] if own is None and self.askers and in_backward() else own

    def restore(self) -> None:
        """Restore everything."""
        for (_, name), (names, before) in self.replaced.items():
            names[name] = before
        self.replaced.clear()


_ANSWERS = _Answers()


def note_values(tensor: Tensor, original: Tensor) -> None:
    """Keep the values of the tensor that this one was copied from, within `masks_by_their_values`."""
    values = _VALUES.get()
    if values is not None:
        values.note(tensor, original)


def note_change(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do to known values what an operator does to its first argument in place, within `masks_by_their_values`."""
    values = _VALUES.get()
    if values is not None:
        values.change(operator, args, kwargs)


@contextmanager
def masks_by_their_values() -> Iterator[None]:
    """Within, transformers reads the values of masks and positions that `note_values` was told of."""
    if _VALUES.get() is not None:
        yield  # as around it
        return
    token = _VALUES.set(values := HostValues())
    try:
        with _ANSWERS.lock:
            _ANSWERS.askers.append(values)
            for name in _MODULES:
                if name in sys.modules:
                    answer(sys.modules[name])
        yield
    finally:
        with _ANSWERS.lock:
            _ANSWERS.askers.remove(values)
            if not _ANSWERS.askers:
                _ANSWERS.restore()
        _VALUES.reset(token)


def answer(asking: ModuleType) -> None:
    """Answer the questions of one of transformers' modules by known values, while a thread is within."""
    before = vars(asking)
    functions = {
        name: one
        for name, one in before.items()
        if isinstance(one, FunctionType) and (name == _PREPARES or not _ASKED.isdisjoint(one.__code__.co_names))
    }
    if _IS_TRACING in before:
        functions[_IS_TRACING] = before[_IS_TRACING]
    with _ANSWERS.lock:
        # Models import some of them by name; what asks about tracing is another's own.
        users = [vars(one) for name, one in list(sys.modules.items()) if name.startswith("transformers.") and one]
        for name, one in functions.items():
            make = _whatever_the_tensor if name == _IS_TRACING else _answered
            for names in [before] if name == _IS_TRACING else users:
                if _ANSWERS.askers and names.get(name) is one and (id(names), name) not in _ANSWERS.replaced:
                    _ANSWERS.replaced[id(names), name] = names, one
                    names[name] = make(one)


def note_copies_to_devices() -> None:
    """Keep the values of all that this process copies to a device from now on, within `masks_by_their_values`."""
    for name in ("to", "cuda"):
        setattr(Tensor, name, _noted(getattr(Tensor, name)))


def _noted(copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(copy)
    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = copy(self, *args, **kwargs)
        if made.is_cuda and not self.is_cuda and not torch.compiler.is_compiling():
            note_values(made, self)
        return made

    return noted


def _whatever_the_tensor(is_tracing: Callable[..., bool]) -> Callable[..., bool]:
    return lambda tensor=None: is_tracing(tensor if _ANSWERS.values() is None else None)


def _answered(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def answered(*args: Any, **kwargs: Any) -> Any:
        values = None if torch.compiler.is_compiling() else _ANSWERS.values()
        if values is None:
            return function(*args, **kwargs)
        with _Following(values):
            return function(*args, **kwargs)

    return answered


class _Following(OperatorMode):  # type: ignore[no-untyped-call]
    """Computes on the host, beside the operators, what follows from known values, and answers what is read."""

    def __init__(self, values: HostValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is LOCAL_SCALAR:
            known = self._values.read(args[0])
            with without_dispatch_modes():
                return True if known is None else known.item()
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and self._values.of(made) is None:
            self._follow(made, func, args, kwargs)
        return made

    def _follow(self, made: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        known = [self._values.of(one) for one in given]
        if made.numel() > _MOST_ELEMENTS or any(one is None for one in known):
            return
        on_host = iter(known)
        args, kwargs = tree_map_only(Tensor, lambda _: next(on_host), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        with without_dispatch_modes():
            self._values.note(made, func(*args, **kwargs))
