"""Sees every operator that runs, and enters the storages it makes in the device's ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memtools._torch import FakeTensor, OperatorMode, in_backward, own_tensors, storage_id
from lightning_memtools.memory.allocator import SimulatedOutOfMemory
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.oom_errors import bytes_refused_by_host
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.cuda_texts import ONE_EXABYTE, too_large_error
from lightning_memtools.memory.virtual.ledger import LedgerEntry, VirtualLedger
from lightning_memtools.memory.virtual.module_scopes import (
    OUTSIDE,
    ModuleNames,
    ModuleScopes,
    stores_gradient,
)
from lightning_memtools.memory.virtual.operators import (
    OperatorKind,
    bytes_to_make,
    compose,
    is_gradient_sum,
    is_matmul,
    kind_of,
    references_of_autograd,
)
from lightning_memtools.memory.virtual.storages import flat, is_among, on_device, parts, storage_key

# Tensors that do not handle operators themselves. All others (wrapper subclasses) get their turn first, and the
# operators they then call on what they wrap are seen here.
_ORDINARY = {torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor}
_kinds: dict[Any, OperatorKind] = {}


OperatorReplacement = Callable[[VirtualLedger, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of an operator with the ledger, a function that runs operators, the operator and its arguments."""


class AccountingMode(OperatorMode):
    """Counts what operators make in one thread. Threads share the ledger; each has its own place in the program.

    Attributes:
        place: Where this thread is in the program.
        silent: Above zero, storages made are host memory.
    """

    def __init__(
        self,
        ledger: VirtualLedger,
        names: ModuleNames,
        *,
        error_of: Callable[[SimulatedOutOfMemory], torch.OutOfMemoryError],
        cublas_workspace: int = 0,
        cuda_like: bool = False,
        replacements: Mapping[Any, OperatorReplacement] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        references_of_autograd()
        self.place = ModuleScopes(ledger)
        self.silent = 0
        self._made_silently: set[int] | None = None
        self._ledger = ledger
        self._names = names
        self._error_of = error_of
        self._cublas_workspace = cublas_workspace
        self._cuda_like = cuda_like
        self._replacements = replacements or {}
        self._is_hooked = bool(replacements) or ledger.listener is not None
        # cuBLAS keeps a workspace per thread, and autograd runs backward in a thread of its own.
        self._has_workspace = {False: False, True: False}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None, *, as_it_is: bool = False
    ) -> Any:
        """Run the operator, or what replaces it unless ``as_it_is``; then account for what it made."""
        if self._is_hooked and not as_it_is:
            return self._run_hooked(func, types, args, kwargs)
        if types and not _ORDINARY.issuperset(types):
            return NotImplemented
        if is_gradient_sum(func, args, kwargs):
            return torch.ops.aten.add_.Tensor(*args)
        kwargs = kwargs or {}
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = kind_of(func)
        if kind is OperatorKind.NOTHING:
            return func(*args, **kwargs)
        if kind is not OperatorKind.FRESH or self.silent:
            return self._run_rare(kind, func, args, kwargs)
        out = self._run_or_refuse(func, args, kwargs)
        for tensor in (out,) if isinstance(out, torch.Tensor) else flat(out):
            self._enter(tensor, args, kwargs)
        if self._cublas_workspace and is_matmul(func):
            self._hold_workspace()
        return out

    # --- told by what surrounds the operators

    @contextmanager
    def silence(self, made: set[int] | None = None) -> Iterator[None]:
        """What is made within is host memory; ``made`` gets the keys of these storages."""
        before = self._made_silently
        self.silent += 1
        self._made_silently = made
        try:
            yield
        finally:
            self.silent -= 1
            self._made_silently = before

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> int:
        """A module is called: what is made from now on is charged to it. Returns the depth to leave to afterwards."""
        place = self.place
        # A module within a step but outside of its closure: an error ended that step before it could say so.
        place.leave_step()
        depth = len(place.scopes)
        caller = place.caller
        if isinstance(module, DistributedDataParallel):
            # A wrapper: what it makes itself are buckets for gradients, and the module in it is the outermost.
            place.scopes.append(OUTSIDE)
            place.tell_listener()
            return depth
        name = self._names.of(module, caller)
        place.scopes.append(name)
        if not self.silent:
            if caller is None:
                self._note_inputs(args, kwargs)
            # Normally known since registration; `module.to()` and a deepcopy put other storages there without a word.
            parameters, buffers = own_tensors(module)
            for parameter in parameters:
                if parameter is not None:
                    self.note(parameter, Category.PARAMETER, name)
            for buffer in buffers:
                if buffer is not None:
                    self.note(buffer, Category.BUFFER, name)
        place.tell_listener()
        return depth

    def enter_tensor(self, tensor: torch.Tensor, category: Category | None) -> None:
        """Enter a tensor made elsewhere. What is known already gets the category, where there is one to give.

        Raises:
            torch.OutOfMemoryError: The device has too little.
        """
        for part in parts(tensor):
            if not on_device(part):
                continue
            entry = self._ledger.find(storage_key(part))
            if entry is None:
                known = Category.OTHER if category is None else category
                self._ask(self._ledger.add, part.untyped_storage(), known, OUTSIDE)
            elif category is not None:
                self._ledger.assign(entry, category)

    def enter_copy(self, tensor: torch.Tensor, category: Category) -> LedgerEntry | None:
        """Enter a tensor as if it had been copied to the device: its own bytes, until it dies or `drop` is called.

        Raises:
            torch.OutOfMemoryError: The device has too little.
        """
        if not on_device(tensor):
            return None
        n_bytes = tensor.numel() * tensor.element_size()
        entry: LedgerEntry | None = self._ask(self._ledger.add_copy, tensor, n_bytes, category, OUTSIDE)
        return entry

    def drop(self, entry: LedgerEntry) -> None:
        """What this stood for has left the device."""
        self._ledger.forget(entry)

    def enter_new(self, tensor: torch.Tensor) -> None:
        """A function that is no operator made this tensor.

        Raises:
            torch.OutOfMemoryError: The device has too little.
        """
        if self.silent:
            self._note_silent(tensor, (), {}, is_new=True)
        else:
            self._enter(tensor, (), {})

    def enter_resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was resized without an operator: give it a block of its new size.

        Raises:
            torch.OutOfMemoryError: The device has too little.
        """
        if self.silent:
            return
        # An unknown storage with a device of its own (meta is that of fake tensors) is none of the CPU's.
        if storage.device.type == "cpu" or self._ledger.find(storage_id(storage)) is not None:
            self._resize(storage, (), {})

    def note(self, tensor: torch.Tensor, category: Category, module: str | None = None) -> None:
        """Say what a tensor is for, if it is on the device."""
        for part in parts(tensor):
            entry = self._ledger.find(storage_key(part))
            if entry is not None and (entry.category is not category or (module and entry.module != module)):
                self._ledger.assign(entry, category, module)

    def leave_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are host memory, wherever they were made; what is known to be of use on the device stays there."""
        for tensor in tensors:
            for part in parts(tensor):
                entry = self._ledger.find(storage_key(part))
                if entry is not None and entry.category is Category.OTHER:
                    self._ledger.forget(entry)

    # --- what operators do

    def _run_or_refuse(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; where the host has no memory for it, the simulated device's refusal comes first.

        A tensor that could never fit on the device is not made at all: the host may have no room for it either, and
        would end the process when it is filled.
        """
        n_bytes = bytes_to_make(func, args, kwargs)
        if n_bytes and self._ledger.exceeds_free(n_bytes):
            self._ask_instead_of_host(n_bytes)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            refused = bytes_refused_by_host(error)
            if refused is None:
                raise
            host_error = error.with_traceback(None)
        self._ask_instead_of_host(refused)
        raise host_error

    def _ask_instead_of_host(self, n_bytes: int) -> None:
        """Raise the simulated error, in place of the host's, if the device has no room for these bytes either."""
        if n_bytes >= ONE_EXABYTE:
            raise too_large_error()
        self._ask(self._ledger.work_with, n_bytes)

    def _enter(self, tensor: torch.Tensor, args: Any, kwargs: Any) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            for part in parts(tensor):
                self._enter(part, args, kwargs)
            return
        key = storage_id(storage)
        if self._ledger.find(key) is not None or not on_device(tensor) or is_among(key, args, kwargs):
            return
        self._ask(self._ledger.add, storage, *self.place.purpose(args, kwargs))

    def _run_hooked(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._ledger.listener is not None:
            self._ledger.listener.on_operator(func)
        replacement = None if self.silent else self._replacements.get(func)
        if replacement is None:
            return self.__torch_dispatch__(func, types, args, kwargs, as_it_is=True)

        def run(func: Any, *args: Any, **kwargs: Any) -> Any:
            return self.__torch_dispatch__(func, types, args, kwargs, as_it_is=True)

        return replacement(self._ledger, run, func, args, kwargs or {})

    def _run_rare(self, kind: OperatorKind, func: Any, args: Any, kwargs: Any) -> Any:
        if kind is OperatorKind.COMPOSED:
            with self:
                return compose(func, args, kwargs)
        if self.silent:
            out = func(*args, **kwargs)
            self._note_silent(out, args, kwargs, is_new=kind is OperatorKind.LIFTED or kind is OperatorKind.RESIZED)
        elif kind is OperatorKind.DETACHED:
            if stores_gradient():
                self.note(args[0], Category.GRADIENT)
            out = func(*args, **kwargs)
        elif kind is OperatorKind.LIFTED:
            out = func(*args, **kwargs)
            # A new optimizer's step counts, which torch keeps in host memory beside parameters on a GPU.
            if not (self._cuda_like and self.place.in_step):
                self._enter(out, (), {})
        else:
            out = self._run_resizing(kind, func, args, kwargs)
        return out

    def _run_resizing(self, kind: OperatorKind, func: Any, args: Any, kwargs: Any) -> Any:
        written = [args[0]] if kind is OperatorKind.RESIZED else [*flat(tuple(kwargs.values()))]
        source = args[1] if kind is OperatorKind.RESIZED and len(args) > 1 else None
        before = [_storage_state(tensor) for tensor in written]
        out = self._run_or_refuse(func, args, kwargs)
        for tensor, state in zip(written, before, strict=True):
            after = _storage_state(tensor)
            # A tensor that was given another tensor's storage shares its fate, on the device or not.
            followed = isinstance(source, torch.Tensor) and after is not None and state is not None
            if after in (None, state) or (followed and after[0] != state[0]) or not on_device(tensor):  # type: ignore[index]
                continue
            self._resize(tensor.untyped_storage(), args, kwargs)
        return out

    def _resize(self, storage: torch.UntypedStorage, args: Any, kwargs: Any) -> None:
        entry = self._ledger.find(storage_id(storage))
        if entry is None:
            self._ask(self._ledger.add, storage, *self.place.purpose(args, kwargs))
        elif entry.n_bytes != storage.nbytes():
            self._ask(self._ledger.resize, entry, storage.nbytes())

    def _note_inputs(self, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in([args, kwargs]):
            for part in parts(tensor):
                entry = self._ledger.find(storage_key(part))
                if entry is not None and entry.category is Category.OTHER:
                    self._ledger.assign(entry, Category.INPUT)

    def _note_silent(self, out: Any, args: Any, kwargs: Any, *, is_new: bool) -> None:
        if self._made_silently is None:
            return
        for tensor in flat(out):
            for part in parts(tensor):
                key = storage_key(part)
                if is_new or not is_among(key, args, kwargs):
                    self._made_silently.add(key)

    def _hold_workspace(self) -> None:
        backward = in_backward()
        if not self._has_workspace[backward]:
            self._ask(self._ledger.hold, self._cublas_workspace)
            self._has_workspace[backward] = True

    def _ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return request(*arguments)
        except SimulatedOutOfMemory as error:
            # Without its frames: they hold the storage, which has to die when the caller's frames are cleared.
            failure = error.with_traceback(None)
        # The error ends the optimizer's step whose own work this was.
        self.place.leave_step()
        # Raised here and not in the handler above: as the new error's context the old one would live as long.
        raise self._error_of(failure)


def _storage_state(tensor: torch.Tensor) -> tuple[int, int] | None:
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        return None
    return storage_id(storage), storage.nbytes()


FindMode = Callable[[], AccountingMode | None]
"""Returns the accounting mode of the thread that it is called in; None where there is none."""
