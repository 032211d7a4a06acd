"""Sees every operator that runs, and enters the storages it makes in the device's ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memtools.memory.allocator import SimulatedOutOfMemory
from lightning_memtools.memory.virtual.accumulation import is_gradient_sum, references_of_autograd
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.kinds import Kind, compose, is_matmul, kind_of
from lightning_memtools.memory.virtual.ledger import Ledger
from lightning_memtools.memory.virtual.names import ModuleNames
from lightning_memtools.memory.virtual.parts import on_device, parts, tensors_in

OUTSIDE = "(outside)"
OPTIMIZER = "(optimizer)"
BACKWARD = "(backward)"

# Tensors that do not handle operators themselves. All others (wrapper subclasses) get their turn first, and the
# operators they then call on what they wrap are seen here.
_ORDINARY = {torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor}
_AccumulateGrad = torch._C._functions.AccumulateGrad
_kinds: dict[Any, Kind] = {}


class AccountingMode(TorchDispatchMode):
    """Counts what operators make in one thread. Threads share the ledger; each has its own place in the program.

    Attributes:
        scopes: Where the program is, innermost last: names of modules being called, `OPTIMIZER` within an optimizer's
            step, `OUTSIDE` within a closure that the step calls.
        silent: Above zero, storages made are host memory.
        made_silently: While silent and not None, the storages made, by their ``_cdata``.
    """

    # torch asks every mode for a rule on each higher-order operator (flex_attention, say); one rule serves here.
    supports_higher_order_operators = True

    def __init__(
        self,
        ledger: Ledger,
        names: ModuleNames,
        *,
        fail: Callable[[SimulatedOutOfMemory], NoReturn],
        cublas_workspace: int = 0,
        cuda_like: bool = False,
    ) -> None:
        super().__init__()
        references_of_autograd()
        self.scopes: list[str] = []
        self.silent = 0
        self.made_silently: set[int] | None = None
        self._ledger = ledger
        self._find = ledger.find
        self._names = names
        self._fail = fail
        self._cublas_workspace = cublas_workspace
        self._cuda_like = cuda_like
        # cuBLAS keeps a workspace per thread, and autograd runs backward in a thread of its own.
        self._has_workspace = {False: False, True: False}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ so that it is never compiled: a third of the cost of an operator here.
        # Nothing is compiled while a device is active (see compilation.py).
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then account for what it made."""
        if types and not _ORDINARY.issuperset(types):
            return NotImplemented
        if is_gradient_sum(func, args, kwargs):
            return torch.ops.aten.add_.Tensor(*args)
        kwargs = kwargs or {}
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = kind_of(func)
        if kind is Kind.NOTHING:
            return func(*args, **kwargs)
        if kind is Kind.COMPOSED:
            with self:
                return compose(func, args, kwargs)
        if self.silent:
            out = func(*args, **kwargs)
            if self.made_silently is not None:
                self._note_silent(out, args, kwargs, is_new=kind is Kind.LIFTED or kind is Kind.RESIZED)
            return out
        if kind is Kind.FRESH:
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                self._enter(out, args, kwargs)
            else:
                for tensor in _flat(out):
                    self._enter(tensor, args, kwargs)
            if self._cublas_workspace and is_matmul(func):
                self._hold_workspace()
            return out
        if kind is Kind.DETACHED:
            self._note_gradient(args[0])
            return func(*args, **kwargs)
        return self._run_rare(kind, func, args, kwargs)

    # --- told by what surrounds the operators

    @contextmanager
    def silence(self, made: set[int] | None = None) -> Iterator[None]:
        """What is made within is host memory; ``made`` gets the storages."""
        before = self.made_silently
        self.silent += 1
        self.made_silently = made
        try:
            yield
        finally:
            self.silent -= 1
            self.made_silently = before

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> int:
        """A module is called: what is made from now on is charged to it. Returns the depth for `leave_to`."""
        scopes = self.scopes
        # A module within a step but outside of its closure: an error ended that step before it could say so.
        while scopes and scopes[-1] is OPTIMIZER:
            scopes.pop()
        depth = len(scopes)
        caller = scopes[-1] if scopes and scopes[-1] is not OUTSIDE else None
        scopes.append(self._names.of(module, caller))
        if self.silent:
            return depth
        if caller is None:
            self._note_inputs(args, kwargs)
        if module._parameters:
            self._note_registered(module._parameters, Category.PARAMETER, scopes[-1])
        if module._buffers:
            self._note_registered(module._buffers, Category.BUFFER, scopes[-1])
        return depth

    def leave_to(self, depth: int) -> None:
        """A module, a closure or a step has ended, well or not."""
        del self.scopes[depth:]

    def enter_tensor(self, tensor: torch.Tensor, category: Category | None, module: str) -> None:
        """Enter a tensor made elsewhere. What is known already gets the category, where there is one to give.

        Raises:
            torch.OutOfMemoryError: The device has too little.
        """
        for part in parts(tensor):
            if not on_device(part):
                continue
            storage = part.untyped_storage()
            entry = self._find(storage._cdata)
            if entry is None:
                self._ask(self._ledger.add, storage, Category.OTHER if category is None else category, module)
            elif category is not None:
                self._ledger.assign(entry, category)

    def note_known(self, tensor: torch.Tensor, category: Category, module: str | None = None) -> None:
        """Say what a tensor is for, if it is on the device."""
        for part in parts(tensor):
            entry = self._find(part.untyped_storage()._cdata)
            if entry is not None and (entry.category is not category or (module and entry.module != module)):
                self._ledger.assign(entry, category, module)

    def leave_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are host memory, wherever they were made."""
        for tensor in tensors:
            for part in parts(tensor):
                entry = self._find(part.untyped_storage()._cdata)
                if entry is not None:
                    self._ledger.forget(entry)

    def enter_copy(self, tensor: torch.Tensor, category: Category) -> None:
        """Enter a tensor as if it had been copied to the device: its own bytes, for as long as it lives.

        Raises:
            torch.OutOfMemoryError: The device has too little.
        """
        self._ask(self._ledger.add_copy, tensor, tensor.numel() * tensor.element_size(), category, OUTSIDE)

    def enter_storage(self, storage: torch.UntypedStorage) -> None:
        """A storage was resized without an operator: give it a block of its new size.

        Raises:
            torch.OutOfMemoryError: The device has too little.
        """
        if self.silent:
            return
        # An unknown storage with a device of its own (meta is that of fake tensors) is none of the CPU's.
        if storage.device.type == "cpu" or self._find(storage._cdata) is not None:
            self._resize(storage, *self._purpose((), {}))

    def enter_new(self, tensor: torch.Tensor) -> None:
        """A function that is no operator made this tensor.

        Raises:
            torch.OutOfMemoryError: The device has too little.
        """
        if self.silent:
            if self.made_silently is not None:
                self._note_silent(tensor, (), {}, is_new=True)
            return
        self._enter(tensor, (), {})

    # --- what operators do

    def _enter(self, tensor: torch.Tensor, args: Any, kwargs: Any) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            for part in parts(tensor):
                self._enter(part, args, kwargs)
            return
        key = storage._cdata
        if self._find(key) is not None or not on_device(tensor) or _is_among(key, args, kwargs):
            return
        self._ask(self._ledger.add, storage, *self._purpose(args, kwargs))

    def _run_rare(self, kind: Kind, func: Any, args: Any, kwargs: Any) -> Any:
        if kind is Kind.LIFTED:
            out = func(*args, **kwargs)
            # A new optimizer's step counts, which torch keeps in host memory beside parameters on a GPU.
            if not (self._cuda_like and self.scopes and self.scopes[-1] is OPTIMIZER):
                self._enter(out, (), {})
            return out
        written = [args[0]] if kind is Kind.RESIZED else [*_flat(tuple(kwargs.values()))]
        before = [_storage_state(tensor) for tensor in written]
        source = args[1] if kind is Kind.RESIZED and len(args) > 1 else None
        out = func(*args, **kwargs)
        for tensor, state in zip(written, before, strict=True):
            after = _storage_state(tensor)
            # A tensor that was given another tensor's storage shares its fate, on the device or not.
            if (
                after is None
                or after == state
                or (isinstance(source, torch.Tensor) and after[0] != (state or after)[0])
            ):
                continue
            if on_device(tensor):
                self._resize(tensor.untyped_storage(), *self._purpose(args, kwargs))
        return out

    def _resize(self, storage: torch.UntypedStorage, category: Category, module: str) -> None:
        entry = self._find(storage._cdata)
        if entry is None:
            self._ask(self._ledger.add, storage, category, module)
        elif entry.n_bytes != storage.nbytes():
            self._ask(self._ledger.resize, entry, storage.nbytes())

    def _purpose(self, args: Any, kwargs: Any) -> tuple[Category, str]:
        """What a storage made now is for, and the module it is charged to."""
        scope = self.scopes[-1] if self.scopes else OUTSIDE
        if torch._C._current_graph_task_id() != -1:
            if isinstance(torch._C._current_autograd_node(), _AccumulateGrad):
                return Category.GRADIENT, BACKWARD
            return Category.ACTIVATION, BACKWARD if scope is OUTSIDE or scope is OPTIMIZER else scope
        if scope is OPTIMIZER:
            return Category.OPTIMIZER, scope
        if scope is not OUTSIDE:
            return Category.ACTIVATION, scope
        category = Category.ACTIVATION if self._comes_from_activations(args, kwargs) else Category.OTHER
        return category, scope

    def _comes_from_activations(self, args: Any, kwargs: Any) -> bool:
        records = torch.is_grad_enabled()
        for tensor in (*_flat(args), *_flat(tuple(kwargs.values()))):
            if records and tensor.requires_grad:
                return True
            for part in parts(tensor):
                entry = self._find(part.untyped_storage()._cdata)
                if entry is not None and entry.category is Category.ACTIVATION:
                    return True
        return False

    def _note_gradient(self, tensor: torch.Tensor) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and isinstance(torch._C._current_autograd_node(), _AccumulateGrad):
            self.note_known(tensor, Category.GRADIENT)

    def _note_inputs(self, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in([args, kwargs]):
            for part in parts(tensor):
                entry = self._find(part.untyped_storage()._cdata)
                if entry is not None and entry.category is Category.OTHER:
                    self._ledger.assign(entry, Category.INPUT)

    def _note_registered(self, tensors: dict[str, Any], category: Category, module: str) -> None:
        # Normally known since registration; `module.to()` and a deepcopy put other storages there without a word.
        for tensor in tensors.values():
            if tensor is not None:
                self.note_known(tensor, category, module)

    def _note_silent(self, out: Any, args: Any, kwargs: Any, *, is_new: bool) -> None:
        assert self.made_silently is not None
        for tensor in _flat(out):
            for part in parts(tensor):
                key = part.untyped_storage()._cdata
                if is_new or not _is_among(key, args, kwargs):
                    self.made_silently.add(key)

    def _hold_workspace(self) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if self._has_workspace[in_backward]:
            return
        self._ask(self._ledger.hold, self._cublas_workspace)
        self._has_workspace[in_backward] = True

    def _ask(self, request: Callable[..., object], *arguments: Any) -> None:
        try:
            request(*arguments)
        except SimulatedOutOfMemory as error:
            # Without its frames: they hold the storage, which has to die when the caller's frames are cleared.
            failure = error.with_traceback(None)
        else:
            return
        # The error ends the optimizer's step whose own work this was.
        while self.scopes and self.scopes[-1] is OPTIMIZER:
            self.scopes.pop()
        # Raised here and not in the handler above: as the new error's context the old one would live as long.
        self._fail(failure)


def _flat(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results: there are lists of them, but nothing deeper."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (tuple, list)):
                yield from (item for item in value if isinstance(item, torch.Tensor))


def _is_among(key: int, args: Any, kwargs: Any) -> bool:
    """Whether a storage is that of an argument."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if _has_storage(value, key):
                return True
        elif isinstance(value, (tuple, list)) and any(_has_storage(tensor, key) for tensor in _flat(value)):
            return True
    return bool(kwargs) and any(_has_storage(tensor, key) for tensor in _flat(tuple(kwargs.values())))


def _has_storage(tensor: torch.Tensor, key: int) -> bool:
    try:
        return tensor.untyped_storage()._cdata == key
    except NotImplementedError:
        return any(part.untyped_storage()._cdata == key for part in parts(tensor))


def _storage_state(tensor: torch.Tensor) -> tuple[int, int] | None:
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        return None
    return storage._cdata, storage.nbytes()
