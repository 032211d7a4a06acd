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
    operator_schema,
    own_tensors,
    storage_id,
    without_dispatch_modes,
    without_torch_function,
)
from lightning_memtools.memory.allocator import SimulatedOutOfMemory
from lightning_memtools.memory.cuda_ops.kernel_table import kernels_on
from lightning_memtools.memory.cuda_ops.kernels import ON_HOST
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.oom_errors import bytes_refused_by_host
from lightning_memtools.memory.sizes import GpuShape
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
    product_workspace_bytes,
    references_of_autograd,
)
from lightning_memtools.memory.virtual.shadows import Shadows, can_be_copied
from lightning_memtools.memory.virtual.storages import flat, is_among, on_device, parts, storage_key, storages_of

# Tensors that do not handle operators themselves. All others (wrapper subclasses) handle an operator first, and the
# operators that they then call on the tensors inside come here.
_ORDINARY = {torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor}
_kinds: dict[Any, OperatorKind] = {}
_ZEROS = torch.ops.aten.zeros.default


OperatorReplacement = Callable[[VirtualLedger, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of an operator with the ledger, a function that runs operators, the operator and its arguments."""

FindResult = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Return the result of an operator for its arguments, or NotImplemented where the operator itself has to run."""


class AccountingMode(OperatorMode):
    """Counts the storages that operators make in one thread. Threads share the ledger.

    Attributes:
        place: The module calls that this thread is in.
        silent: If it is above zero, new storages are host memory.
        gpu: The GPU whose kernels are counted.
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
        replacements: Mapping[Any, OperatorReplacement] | None = None,
        result_of: FindResult | None = None,
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
        self.gpu = gpu or GpuShape()
        self._kernels = kernels_on(self.gpu) if cuda_like else {}
        self._shadows: Shadows | None = None
        self._purpose: tuple[Category, str] | None = None
        self._replacements = replacements or {}
        self._result_of = result_of
        self._is_hooked = cuda_like or bool(replacements) or ledger.listener is not None
        # cuBLAS keeps a workspace per thread, and autograd runs backward in a thread of its own.
        self._has_workspace = {False: False, True: False}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None, *, as_it_is: bool = False
    ) -> Any:
        """Run the operator, or its replacement unless ``as_it_is``; then account for the storages that it made."""
        if self._is_hooked and not as_it_is:
            # Modes of functions are for the step's own code: here they would see each attribute that is read.
            with without_torch_function():
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
            return self._run(func, args, kwargs)
        if kind is not OperatorKind.FRESH or self.silent or (func is _ZEROS and self._is_count_of_steps(args)):
            return self._run_rare(kind, func, args, kwargs)
        out = self._run_or_refuse(func, args, kwargs)
        is_one = isinstance(out, torch.Tensor)
        # Once for all: operators on lists make hundreds of tensors of hundreds of others.
        given = None if is_one else storages_of(args, kwargs)
        for tensor in (out,) if is_one else flat(out):
            self._enter(tensor, args, kwargs, given)
        if self._cublas_workspace and is_matmul(func):
            self._take_workspace(func, args, kwargs)
        return out

    # --- called by the hooks in surroundings.py and loaders.py, and by the device

    @contextmanager
    def silence(self, made: set[int] | None = None) -> Iterator[None]:
        """Treat storages that are made within as host memory, and add their keys to ``made``."""
        before = self._made_silently
        self.silent += 1
        self._made_silently = made
        try:
            yield
        finally:
            self.silent -= 1
            self._made_silently = before

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> int:
        """Charge storages to a module from its call on, and return the depth for `ModuleScopes.leave_to` afterwards."""
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
        """Enter a tensor that was not made by an operator in this mode.

        If it is known already, it gets the category, unless that is None.

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
        """Enter a copy of a tensor, which takes the tensor's own bytes until the tensor dies or `drop` is called.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        if not on_device(tensor):
            return None
        n_bytes = tensor.numel() * tensor.element_size()
        entry: LedgerEntry | None = self._ask(self._ledger.add_copy, tensor, n_bytes, category, OUTSIDE)
        return entry

    def drop(self, entry: LedgerEntry) -> None:
        """Free the memory of an entry, such as that of a copied batch."""
        self._ledger.forget(entry)

    def enter_new(self, tensor: torch.Tensor) -> None:
        """Enter a tensor that was made by a function that is not an operator.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        if self.silent:
            self._note_silent(tensor, (), {}, is_new=True)
        else:
            self._enter(tensor, (), {})

    def enter_resized(self, storage: torch.UntypedStorage) -> None:
        """Give a storage that was resized without an operator a block of its new size.

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
        """Take tensors off the device, except those with a category other than OTHER, which are in use there."""
        for tensor in tensors:
            for part in parts(tensor):
                entry = self._ledger.find(storage_key(part))
                if entry is not None and entry.category is Category.OTHER:
                    self._ledger.forget(entry)

    # --- operators

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._result_of is not None:
            known = self._result_of(func, args, kwargs)
            if known is not NotImplemented:
                return known
        return func(*args, **kwargs)

    def _run_or_refuse(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, unless its result could never fit on the device: then raise SimulatedOutOfMemory first.

        The host may have no room for such a tensor either, and would end the process when it is filled.
        """
        n_bytes = bytes_to_make(func, args, kwargs)
        if n_bytes and self._ledger.exceeds_free(n_bytes):
            self._ask_instead_of_host(n_bytes)
        try:
            return self._run(func, args, kwargs)
        except RuntimeError as error:
            refused = bytes_refused_by_host(error)
            if refused is None:
                raise
            host_error = error.with_traceback(None)
        self._ask_instead_of_host(refused)
        raise host_error

    def _ask_instead_of_host(self, n_bytes: int) -> None:
        """Raise the simulated out-of-memory error, not the host's, if the device has no room for these bytes."""
        if n_bytes >= ONE_EXABYTE:
            raise too_large_error()
        self._ask(self._ledger.work_with, n_bytes)

    def _enter(self, tensor: torch.Tensor, args: Any, kwargs: Any, given: set[int] | None = None) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            for part in parts(tensor):
                self._enter(part, args, kwargs, given)
            return
        key = storage_id(storage)
        if self._ledger.find(key) is not None or not on_device(tensor):
            return
        if is_among(key, args, kwargs) if given is None else key in given:
            return
        self._ask(self._ledger.add, storage, *(self._purpose or self.place.purpose(args, kwargs)))

    def _run_hooked(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:  # more than half of all calls in a simulated step
            return args[0].fake_device
        if self._ledger.listener is not None:
            self._ledger.listener.on_operator(func)
        replacement = None if self.silent else self._replacements.get(func) or self._kernels.get(func)
        compute = ON_HOST.get(func, func) if self._cuda_like and FakeTensor not in types else func
        if replacement is None:
            # In the same tuple: sums of gradients are known by how often a tensor is referred to.
            return self.__torch_dispatch__(compute, types, args, kwargs, as_it_is=True)
        if not _ORDINARY.issuperset(types):
            return NotImplemented
        kwargs = kwargs or {}

        def run(func: Any, *args: Any, **kwargs: Any) -> Any:
            return self.__torch_dispatch__(func, types, args, kwargs, as_it_is=True)

        if func in self._replacements or FakeTensor in types:
            out = self._ask(replacement, self._ledger, run, func, args, kwargs)
            # A kernel may return more than the operator; torch reads past the end of the schema then.
            n = len(operator_schema(func).returns)
            return out[:n] if n > 1 and len(out) > n else out
        if not can_be_copied(args, kwargs):
            return run(compute, *args, **kwargs)

        def kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return replacement(self._ledger, run, func, args, kwargs)

        return self._run_beside(kernel, run, compute, args, kwargs)

    def _run_beside(
        self, kernel: Callable[..., Any], run: Callable[..., Any], compute: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Compute an operator on the host, and allocate what CUDA's kernel does for it."""
        if self._shadows is None:
            self._shadows = Shadows(self._ledger)
        self._purpose = self.place.purpose(args, kwargs)
        try:
            _, pass_on = self._ask(self._shadows.run, kernel, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001, the operator itself says what is wrong, or knows more than the kernel
            pass_on = None
        finally:
            self._purpose = None
        if pass_on is None:
            return run(compute, *args, **kwargs)
        out = compute(*args, **kwargs)
        pass_on(out)
        return out

    def stand_in(
        self, func: Any, compute: Callable[[], tuple[torch.Tensor, ...]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Compute something on the host, which does not count, and allocate what CUDA's kernel for an operator does.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """

        def run(func: Any, *args: Any, **kwargs: Any) -> Any:
            return self.__torch_dispatch__(func, (), args, kwargs, as_it_is=True)

        def kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._kernels[func](self._ledger, run, func, args, kwargs)

        if self._shadows is None:
            self._shadows = Shadows(self._ledger)
        self._purpose = self.place.purpose(args, kwargs)
        try:
            with without_dispatch_modes():  # this one too: kernels call it for what counts
                made, pass_on = self._ask(self._shadows.run, kernel, args, kwargs)
        finally:
            self._purpose = None
        with self.silence():
            out = tuple(map(_laid_out_as, compute(), made))
        pass_on(out)
        return out

    def _run_rare(self, kind: OperatorKind, func: Any, args: Any, kwargs: Any) -> Any:
        if kind is OperatorKind.COMPOSED:
            with self:
                return compose(func, args, kwargs)
        if self.silent:
            out = self._run(func, args, kwargs)
            self._note_silent(out, args, kwargs, is_new=kind is OperatorKind.LIFTED or kind is OperatorKind.RESIZED)
        elif kind is OperatorKind.DETACHED:
            if stores_gradient():
                self.note(args[0], Category.GRADIENT)
            out = self._run(func, args, kwargs)
        elif kind is OperatorKind.LIFTED:
            out = self._run(func, args, kwargs)
            # These are the step counts of a new optimizer, which torch keeps in host memory for parameters on a GPU.
            if not (self._cuda_like and self.place.in_step):
                self._enter(out, (), {})
        elif kind is OperatorKind.FRESH:
            out = self._run(func, args, kwargs)
        else:
            out = self._run_resizing(kind, func, args, kwargs)
        return out

    def _is_count_of_steps(self, args: Any) -> bool:
        """Return whether a new optimizer makes a count of its steps, which stays in host memory beside a GPU."""
        return self._cuda_like and self.place.in_step and self.place.counts_on_host and not args[0]

    def _run_resizing(self, kind: OperatorKind, func: Any, args: Any, kwargs: Any) -> Any:
        written = [args[0]] if kind is OperatorKind.RESIZED else [*flat(tuple(kwargs.values()))]
        source = args[1] if kind is OperatorKind.RESIZED and len(args) > 1 else None
        before = [_storage_state(tensor) for tensor in written]
        out = self._run_or_refuse(func, args, kwargs)
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

    def _note_silent(self, out: Any, args: Any, kwargs: Any, *, is_new: bool) -> None:
        if self._made_silently is None:
            return
        for tensor in flat(out):
            for part in parts(tensor):
                key = storage_key(part)
                if is_new or not is_among(key, args, kwargs):
                    self._made_silently.add(key)

    def _take_workspace(self, func: Any, args: Any, kwargs: Any) -> None:
        if not KEEPS_CUBLAS_WORKSPACES:
            self._ask(self._ledger.work_with, product_workspace_bytes(func, args, kwargs, self._cublas_workspace))
            return
        backward = in_backward()
        if not self._has_workspace[backward]:
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


def _laid_out_as(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of another of its shape; later copies depend on them."""
    if one.shape != other.shape or one.stride() == other.stride():
        return one
    return one.new_empty_strided(one.shape, other.stride()).copy_(one)


def _storage_state(tensor: torch.Tensor) -> tuple[int, int] | None:
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        return None
    return storage_id(storage), storage.nbytes()


FindMode = Callable[[], AccountingMode | None]
"""Return the accounting mode of the thread that it is called in; None where there is none."""
