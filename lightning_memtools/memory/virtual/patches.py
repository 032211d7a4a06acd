"""Replaces functions of torch while a device is active, so that code behaves as on CUDA and runs eagerly."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lightning_memtools._torch import (
    CAPTURABLE_DEVICE_LOOKUPS,
    DROPOUT_NAMESPACES,
    FOREACH_DEVICE_LOOKUPS,
    FOREACH_TENSOR_TYPES,
    FakeTensor,
    is_compiler_loaded,
    without_torch_function,
)
from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.warning_categories import DegradedWarning

_ABSENT = object()


class Patches:
    """Replaces attributes, and restores them in reverse order. Restoring is idempotent.

    Other code may keep a replacement and set it again later, so each replacement checks `undone` before it acts.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []
        self.undone = False

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` with ``make(original)``, which gets the original's name and docstring."""
        original = getattr(owner, name)
        # An inherited attribute is restored by deleting the new one.
        own = vars(owner).get(name, _ABSENT)
        new = functools.wraps(original)(make(original)) if callable(original) else make(original)
        setattr(owner, name, new)
        self._done.append((owner, name, own, new))

    def undo(self) -> None:
        """Restore all attributes, except those that other code has replaced again since then."""
        self.undone = True
        while self._done:
            owner, name, own, new = self._done.pop()
            if vars(owner).get(name) is not new:
                continue
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def behave_like_cuda(patches: Patches) -> None:
    """Patch torch to act as on CUDA: dropout keeps a bool mask, optimizers accept `capturable` and prefer `foreach`.

    Without the patches, dropout on CPU tensors keeps its mask in the input's type and draws it differently, and
    optimizers update parameters one by one. So dropout masks and rounding differ between runs with and without them.
    """

    def make_dropout(original: Any) -> Any:
        def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002, torch's name
            # The condition of is_fused_kernel_acceptable in ATen/native/Dropout.cpp.
            if train and 0 < p < 1 and input.numel() > 0 and not patches.undone:
                return torch.native_dropout(input, p, train)[0]
            out: torch.Tensor = original(input, p, train)
            return out

        return dropout

    for namespace in DROPOUT_NAMESPACES:
        patches.replace(namespace, "dropout", make_dropout)
    for owner, name in CAPTURABLE_DEVICE_LOOKUPS:
        patches.replace(owner, name, lambda original: lambda *given, **named: [*original(*given, **named), "cpu"])
    for owner, name in FOREACH_DEVICE_LOOKUPS:
        patches.replace(owner, name, lambda original: lambda: [*original(), "cpu"])
    for owner, name in FOREACH_TENSOR_TYPES:
        patches.replace(owner, name, lambda original: [*original, FakeTensor])


def allow_subclasses(patches: Patches) -> None:
    """Patch `Tensor.__new__(cls, tensor)`, which makes a tensor of a subclass: torch raises under a dispatch mode."""

    def make(original: Any) -> Any:
        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if patches.undone or cls is torch.Tensor or kwargs or len(args) != 1 or not torch.is_tensor(args[0]):
                return original(cls, *args, **kwargs)
            with without_torch_function():
                return args[0].as_subclass(cls)

        return new

    patches.replace(torch.Tensor, "__new__", make)


class EagerCompilation:
    """Makes compiled code run eagerly, and restores the compiler's settings afterwards.

    Under a dispatch mode, torch compiles nothing new, but would run code that was compiled before. The mode would not
    see that code's memory. Torch would also mark every function that is called as never to be compiled.
    """

    def __init__(self) -> None:
        self._stances = ExitStack()
        self._is_first = FirstTime()

    def begin(self, patches: Patches) -> None:
        """Switch compilation off: now if the compiler is loaded, otherwise at the first call of `torch.compile`."""
        if is_compiler_loaded():
            self._force_eager()

        def make(original: Any) -> Any:
            def compile_(*args: Any, **kwargs: Any) -> Any:
                if not patches.undone:
                    self.say()
                    self._force_eager()
                return original(*args, **kwargs)

            return compile_

        patches.replace(torch, "compile", make)

    def say(self) -> None:
        """Warn, at the first call only, that compiled code runs eagerly."""
        if self._is_first():
            warnings.warn(
                "torch.compile has no effect inside a VirtualDevice: compiled code runs eagerly there, and its memory "
                "is that of the eager run.",
                DegradedWarning,
                stacklevel=3,
            )

    def end(self) -> None:
        """Restore the compiler's settings from before `begin`."""
        self._stances.close()

    def _force_eager(self) -> None:
        self._stances.enter_context(torch.compiler.set_stance("force_eager"))
