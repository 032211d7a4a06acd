"""Intercepts every operator, and enters the storages that it makes in the device's ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memtools._torch import (
    DEVICE_OF,
    KEEPS_CUBLAS_WORKSPACES,
    FakeTensor,
    OperatorMode,
    in_backward,
    own_tensors,
    run_composite,
    storage_id,
    stores_gradient,
    without_torch_function,
)
from lightning_memtools.memory.allocator import SimulatedOutOfMemory
from lightning_memtools.memory.cuda_ops.rules import Call, Rule
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.sizes import GpuShape
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.ledger import LedgerEntry, VirtualLedger
from lightning_memtools.memory.virtual.module_scopes import OUTSIDE, ModuleNames, ModuleScopes
from lightning_memtools.memory.virtual.operators import OperatorKind, is_matmul, kind_of
from lightning_memtools.memory.virtual.storages import flat, on_device, own_storages, parts, storage_key, storages_of

# Tensors that do not handle operators themselves. All others (wrapper subclasses) handle an operator first, and the
# operators that they then call on the tensors inside come here.
_ORDINARY = {torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor}
_kinds: dict[Any, OperatorKind] = {}
_ZEROS = torch.ops.aten.zeros.default

RunOperator = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Returns the result of an operator for its arguments. An interceptor may return NotImplemented instead."""


class AccountingMode(OperatorMode):
    """A dispatch mode that counts the storages that one thread's operators create as memory of a simulated device.

    All threads share one ledger, which lists these storages. Before an operator runs, the mode calls functions that may
    supply its result (interceptors). If none of them does, the operator runs, and its new storages are counted.

    Attributes:
        place: The stack of module calls of this thread.
        silent: The nesting depth of `silence`. While it is above zero, new storages count as host memory.
    """

    def __init__(
        self,
        ledger: VirtualLedger,
        names: ModuleNames,
        *,
        error_of: Callable[[SimulatedOutOfMemory], torch.OutOfMemoryError],
        cublas_workspace: int = 0,
        cuda_like: bool = False,
        gpu: GpuShape | None = None,
        rules: Mapping[Any, Rule] | None = None,
        run: RunOperator | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = ModuleScopes(ledger)
        self.silent = 0
        self._made_silently: set[int] | None = None
        self._ledger = ledger
        self._names = names
        self._error_of = error_of
        self._cublas_workspace = cublas_workspace
        self._cuda_like = cuda_like
        self._gpu = gpu or GpuShape()
        self._rules = rules or {}
        self._run = run
        self._interceptors: list[RunOperator] = []
        if ledger.listener is not None or rules:
            self._interceptors = [self._tell_listener, self._by_rule]
        # cuBLAS keeps a workspace per thread, and autograd runs backward in a thread of its own.
        self._has_workspace = {False: False, True: False}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return an operator's result from an interceptor, or run the operator and count its new storages."""
        if func is DEVICE_OF and type(args[0]) is FakeTensor:  # more than half of all calls in a simulated step
            return args[0].fake_device
        if types and not _ORDINARY.issuperset(types):
            return NotImplemented
        kwargs = kwargs or {}
        if not self._interceptors:
            return self._run_counted(func, args, kwargs)
        # Modes of functions are for the step's own code: here they would see each attribute that is read.
        with without_torch_function():
            for intercept in self._interceptors:
                out = intercept(func, args, kwargs)
                if out is not NotImplemented:
                    return out
            return self._run_counted(func, args, kwargs)

    # --- called by the hooks in surroundings.py and loaders.py, and by the device

    @contextmanager
    def silence(self, made: set[int] | None = None) -> Iterator[None]:
        """Return a context in which new storages count as host memory. Their ids are added to ``made``, if given."""
        before = self._made_silently
        self.silent += 1
        self._made_silently = made
        try:
            yield
        finally:
            self.silent -= 1
            self._made_silently = before

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> int:
        """Push a module on the stack of calls, so that it is charged for new storages. Return the stack's old depth."""
        place = self.place
        # A module runs within an optimizer's step only in its closure. Otherwise an error has ended that step.
        place.leave_step()
        depth = len(place.scopes)
        caller = place.caller
        if isinstance(module, DistributedDataParallel):
            # DDP itself makes buckets for gradients, and the module that it wraps counts as the outermost.
            place.scopes.append(OUTSIDE)
            place.tell_listener()
            return depth
        name = self._names.of(module, caller)
        place.scopes.append(name)
        if not self.silent:
            if caller is None:
                self._note_inputs(args, kwargs)
            # Most are known since registration, but `module.to()` and a deepcopy replace storages without a hook.
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
        """Allocate device memory for a tensor that has none yet: it may be older than this mode.

        If the tensor is on the device already, only its category changes; None leaves the category as it is.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
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
        """Allocate device memory for a copy of a tensor, to be freed by `drop` or when the tensor dies.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        if not on_device(tensor):
            return None
        n_bytes = tensor.numel() * tensor.element_size()
        entry: LedgerEntry | None = self._ask(self._ledger.add_copy, tensor, n_bytes, category, OUTSIDE)
        return entry

    def drop(self, entry: LedgerEntry) -> None:
        """Free the device memory of an entry, such as a copied batch."""
        self._ledger.forget(entry)

    def enter_resized(self, storage: torch.UntypedStorage) -> None:
        """Move a storage to a block of its new size, after it was resized without an operator.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        if self.silent:
            return
        # Storages of other devices do not count; those of fake tensors, on meta, count if they are known.
        if storage.device.type == "cpu" or self._ledger.find(storage_id(storage)) is not None:
            self._resize(storage, (), {})

    def note(self, tensor: torch.Tensor, category: Category, module: str | None = None) -> None:
        """Set the category of a tensor that is on the device, and the module that it is charged to."""
        for part in parts(tensor):
            entry = self._ledger.find(storage_key(part))
            if entry is not None and (entry.category is not category or (module and entry.module != module)):
                self._ledger.assign(entry, category, module)

    def leave_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take tensors off the device, because they are host memory. This skips tensors that have a known category."""
        for tensor in tensors:
            for part in parts(tensor):
                entry = self._ledger.find(storage_key(part))
                if entry is not None and entry.category is Category.OTHER:
                    self._ledger.forget(entry)

    # --- interceptors

    def _tell_listener(self, func: Any, args: Any, kwargs: Any) -> Any:
        del args, kwargs
        if self._ledger.listener is not None:
            self._ledger.listener.on_operator(func)
        return NotImplemented

    def _by_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        rule = None if self.silent else self._rules.get(func)
        if rule is None:
            return NotImplemented
        with self._ledger.workspaces() as (hold, release):
            return self._ask(rule, Call(self._run_part, func, args, kwargs, self._gpu, hold, release))

    def _run_part(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run_counted(func, args, kwargs)

    # --- operators

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, by the function passed to `VirtualDevice.run_operators_by` if there is one."""
        return func(*args, **kwargs) if self._run is None else self._run(func, args, kwargs)

    def account(self, kind: OperatorKind, out: Any, args: Any, kwargs: Any) -> None:
        """Put the storages of an operator's result on the device, except those that it shares with the arguments.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        is_lifted = kind is OperatorKind.LIFTED  # its argument is what is new
        if self.silent:
            self._note_silent(out, () if is_lifted or kind is OperatorKind.RESIZED else args, kwargs)
            return
        given: set[int] | None = None
        for tensor in (out,) if isinstance(out, torch.Tensor) else flat(out):
            for storage in own_storages(tensor):
                key = storage_id(storage)
                if self._ledger.find(key) is not None or not on_device(tensor):
                    continue
                if given is None:
                    given = set() if is_lifted else storages_of(args, kwargs)
                if key not in given:
                    self._ask(self._ledger.add, storage, *self.place.purpose(() if is_lifted else args, kwargs))

    def _run_counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = kind_of(func)
        if kind is OperatorKind.NOTHING:
            return self.run(func, args, kwargs)
        if kind is OperatorKind.COMPOSED:
            with self:
                return run_composite(func, args, kwargs)
        if kind in {OperatorKind.RESIZED, OperatorKind.OUT} and not self.silent:
            return self._run_resizing(kind, func, args, kwargs)
        out = self.run(func, args, kwargs)
        if kind is OperatorKind.DETACHED:
            if stores_gradient() and not self.silent:
                self.note(args[0], Category.GRADIENT)
        elif self.silent or not self._is_count_of_steps(kind, func, args):
            self.account(kind, out, args, kwargs)
            if self._cublas_workspace and not self.silent and is_matmul(func):
                self._take_workspace()
        return out

    def _is_count_of_steps(self, kind: OperatorKind, func: Any, args: Any) -> bool:
        """Return whether an operator creates an optimizer's step counter, which even on a GPU stays in host memory."""
        if not (self._cuda_like and self.place.in_step):
            return False
        return kind is OperatorKind.LIFTED or (func is _ZEROS and self.place.counts_on_host and not args[0])

    def _run_resizing(self, kind: OperatorKind, func: Any, args: Any, kwargs: Any) -> Any:
        written = [args[0]] if kind is OperatorKind.RESIZED else [*flat(tuple(kwargs.values()))]
        source = args[1] if kind is OperatorKind.RESIZED and len(args) > 1 else None
        before = [_storage_state(tensor) for tensor in written]
        out = self.run(func, args, kwargs)
        for tensor, state in zip(written, before, strict=True):
            after = _storage_state(tensor)
            # A tensor that got another tensor's storage is on the device only if that storage is.
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

    def _note_silent(self, out: Any, args: Any, kwargs: Any) -> None:
        if self._made_silently is not None:
            made = {storage_key(part) for tensor in flat(out) for part in parts(tensor)}
            self._made_silently |= made - storages_of(args, kwargs)

    def _take_workspace(self) -> None:
        backward = in_backward()
        if not KEEPS_CUBLAS_WORKSPACES:
            with self._ledger.workspaces() as (hold, _):
                self._ask(hold, self._cublas_workspace)
        elif not self._has_workspace[backward]:
            self._ask(self._ledger.hold, self._cublas_workspace)
            self._has_workspace[backward] = True

    def _ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return request(*arguments)
        except SimulatedOutOfMemory as error:
            # Its traceback is dropped: the frames in it hold the storage, which has to die when the caller's frames are
            # cleared.
            failure = error.with_traceback(None)
        # If an optimizer's step asked for this memory, the error ends that step.
        self.place.leave_step()
        # Raised outside of the handler above, where the new error would keep the old one alive as its context.
        raise self._error_of(failure)


def _storage_state(tensor: torch.Tensor) -> tuple[int, int] | None:
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        return None
    return storage_id(storage), storage.nbytes()


FindMode = Callable[[], AccountingMode | None]
"""Returns the accounting mode of the calling thread; None if it has none."""
