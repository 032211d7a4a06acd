"""`VirtualDevice`, which simulates the memory of a GPU on a machine without one."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memtools.memory.allocator import (
    AllocationTrace,
    AllocatorConfig,
    AllocatorHistory,
    CachingAllocator,
    SimulatedOutOfMemory,
    take_snapshot,
)
from lightning_memtools.memory.cuda_ops.functions import flatten_weights
from lightning_memtools.memory.cuda_ops.rules import Rule
from lightning_memtools.memory.sizes import GpuShape, context_bytes, find_gpu, format_size, parse_capacity, parse_size
from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.memory.virtual.accounting_mode import AccountingMode, RunOperator
from lightning_memtools.memory.virtual.attribution import attribute, composition_of, enter_all, trackable
from lightning_memtools.memory.virtual.categories import Category, Composition, as_log_names
from lightning_memtools.memory.virtual.cuda_texts import cuda_error
from lightning_memtools.memory.virtual.ledger import DeviceListener, LedgerEntry, VirtualLedger
from lightning_memtools.memory.virtual.loaders import count_batch
from lightning_memtools.memory.virtual.module_scopes import ModuleNames
from lightning_memtools.memory.virtual.storages import parts, storage_key
from lightning_memtools.memory.virtual.surroundings import DeviceHooks

OomObserver = Callable[[int, int, int, int], object]
"""Called, like torch's observers for CUDA, with the device's index, the requested, the total and the free bytes."""

_here = threading.local()
_active: list[VirtualDevice] = []


class VirtualDevice:
    """Simulates a GPU's memory: shows how much a program would allocate and reserve, and where it would run out.

    While the device is active (inside its `with` block), every tensor that PyTorch creates on the CPU also takes memory
    in a simulated CUDA caching allocator. This works with fake tensors (``torch._subclasses.FakeTensorMode``), too.
    Without `cuda_like`, the program's results do not change: weights and random numbers are bitwise the same as without
    a device.

    A storage counts once: from the moment that an operator creates or resizes it, or that `track` is called, until it
    is freed. A batch counts when its data loader yields it; datasets are host memory.

    A process can have one active device at a time. Pickling a device keeps its options only.

    Args:
        capacity: The memory of the device: a size such as ``"24GiB"``, a number of bytes, or a GPU's name such as
            ``"RTX 4090"``, which stands for the memory that a process can use on this GPU. None for no limit.
        allocator: The allocator's settings, as in PYTORCH_ALLOC_CONF: ``"expandable_segments:True"``.
        context: The part of the capacity that the CUDA context takes. The default is 500 MiB if the capacity is a GPU's
            name, and 0 otherwise.
        used_by_others: The part of the capacity that other processes take.
        cublas_workspace: The size of a cuBLAS workspace: "32MiB" on Hopper, "8519680B" on other GPUs. cuBLAS takes one
            workspace in forward and another in backward. By default, workspaces are not counted.
        cuda_like: Make CPU tensors behave like CUDA tensors: dropout keeps a mask of bools, autocast casts for CUDA's
            list of operators, optimizers use foreach, and Adam's step counts stay on the host. This changes the random
            numbers of dropout and the dtypes under autocast. Autocast is affected in all threads.
        record: Whether to keep a trace of all events of the allocator, in `trace`.

    Raises:
        ValueError: An option is not valid; the message says which values are accepted.
    """

    def __init__(
        self,
        capacity: str | int | None = None,
        *,
        allocator: str = "",
        context: str | int | None = None,
        used_by_others: str | int = "0MiB",
        cublas_workspace: str | int = "0MiB",
        cuda_like: bool = False,
        record: bool = False,
    ) -> None:
        self._options: dict[str, Any] = {
            "capacity": capacity,
            "allocator": allocator,
            "context": context,
            "used_by_others": used_by_others,
            "cublas_workspace": cublas_workspace,
            "cuda_like": cuda_like,
            "record": record,
        }
        self._capacity = None if capacity is None else parse_capacity(capacity)
        self._context = _size_of("context", context) if context is not None else context_bytes(capacity)
        self._cublas_workspace = _size_of("cublas_workspace", cublas_workspace)
        self._cuda_like = cuda_like
        self.gpu = GpuShape.of(find_gpu(capacity))
        others = self._context + _size_of("used_by_others", used_by_others)
        if self._capacity is not None and others >= self._capacity:
            raise ValueError(
                f"Nothing is left of the capacity {capacity!r} ({format_size(self._capacity)}): the context and other "
                f"processes take {format_size(others)}. Raise capacity, or lower context or used_by_others."
            )
        self._allocator = CachingAllocator(
            AllocatorConfig.parse(allocator),
            capacity=self._capacity,
            used_by_others=others,
            record=record,
        )
        self._history: AllocatorHistory | None = None
        self._ledger = VirtualLedger(self._allocator)
        self._names = ModuleNames()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # An OrderedDict, because handles refer to it weakly, which a plain dict does not allow.
        self._observers: OrderedDict[int, OomObserver] = OrderedDict()
        self._modes: list[AccountingMode] = []
        self._rules: Mapping[Any, Rule] = {}
        self._run: RunOperator | None = None
        self._thread: int | None = None
        self._hooks = DeviceHooks(
            _mode_here, seen=self._optimizers.add, run_counted=self._run_counted, cuda_like=cuda_like
        )

    # --- entering and leaving

    @staticmethod
    def current() -> VirtualDevice | None:
        """Return the process's active device, no matter which thread entered it; None if there is none."""
        return _active[0] if _active else None

    def __enter__(self) -> Self:
        if _active:
            raise RuntimeError(
                f"Cannot enter {self.name}: {_active[0].name} is entered already, and a process can have one at a "
                "time. Leave that one first, or use VirtualDevice.current()."
            )
        _active.append(self)
        self._thread = threading.get_ident()
        try:
            self._hooks.begin()
        except BaseException:
            self._leave()
            raise
        self._enter_thread(self._run).__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if self._thread is None:
            return
        if self._thread != threading.get_ident():
            raise RuntimeError(
                f"{self.name} was entered in thread {self._thread} and can only be left there; this is thread "
                f"{threading.get_ident()}. Leave it where it was entered, best by a with statement."
            )
        mode = _here.mode
        _here.mode = None
        self._leave()
        mode.__exit__(kind, error, traceback)

    def host(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's new tensors count as host memory. Meant for loading data sets."""
        mode = _mode_here()
        return nullcontext() if mode is None else mode.silence()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which the device is suspended: nothing counts, and another device can be entered.

        Storages that are on the device stay there until they die. Use this in the thread that entered the device, while
        no other thread works with the device.

        Raises:
            RuntimeError: This thread has not entered the device.
        """
        mode = _mode_here()
        if VirtualDevice.current() is not self or mode is None:
            raise RuntimeError(f"{self.name} is not entered in this thread, so there is nothing to suspend.")
        with mode.silence():
            self._hooks.end()
            _active.remove(self)
            _here.mode = None
            try:
                yield
            finally:
                _here.mode = mode
                _active.append(self)
                self._hooks.begin()

    # --- the tensors on the device

    def track(self, *things: object) -> int:
        """Put existing modules, optimizers and tensors on the device, alone or in nested containers.

        This includes the gradients of modules, and the parameters and state of optimizers. If a tensor is on the device
        already, only its category is updated. Returns the number of bytes that were allocated.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
            TypeError: One of the things holds no module, optimizer or tensor.
        """
        before = self._allocator.allocated
        mode = self._mode_or_new()
        with mode.silence():
            for thing in things:
                found = list(trackable(thing))
                if not found:
                    raise TypeError(
                        f"Nothing to track in {type(thing).__name__} {thing!r:.80}. Pass modules, optimizers, tensors, "
                        "or containers of these."
                    )
                for one in found:
                    if isinstance(one, nn.Module):
                        self._names.add_root(one)
                    elif isinstance(one, Optimizer):
                        self._optimizers.add(one)
                    enter_all(one, mode.enter_tensor, flatten_weights if self._cuda_like else None)
        return self._allocator.allocated - before

    def count_batch(self, batch: object) -> None:
        """Put a batch on the device, as moving it to a GPU would. For a DataLoader's batches this is automatic.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        count_batch(self._mode_or_new(), batch, set(), from_workers=True)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is on the device and not on the host."""
        find = self._ledger.find
        return any(find(storage_key(part)) is not None or find(-id(part)) is not None for part in parts(tensor))

    def address_of(self, tensor: torch.Tensor) -> int | None:
        """Return the address of a tensor's block on the device, as shown in snapshots; None without a block."""
        entries = (self._ledger.find(storage_key(part)) for part in parts(tensor))
        return next((entry.block.address for entry in entries if entry is not None), None)

    def observe_oom(self, callback: OomObserver) -> RemovableHandle:
        """Call ``callback(device, n_bytes, total_bytes, free_bytes)`` when memory runs out, before the error is raised.

        ``device`` is 0, and ``n_bytes`` is the size that was requested from the device. If the callback raises, a note
        about it is added to the out-of-memory error. Returns a handle whose ``remove()`` removes the callback.
        """
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = callback
        return handle

    # --- listening, and rules of operators

    def listen(self, listener: DeviceListener) -> None:
        """Call a listener at every operator, module call, allocation and free, from the next `with` block on."""
        self._ledger.listener = listener

    def apply_rules(self, rules: Mapping[Any, Rule]) -> None:
        """Register functions to be called in place of operators (the keys of `rules`) from the next `with` block on."""
        self._rules = rules

    def run_operators_by(self, run: RunOperator) -> None:
        """From the next `with` block on, call `run` in place of each operator, in the thread that enters the device."""
        self._run = run

    def assign(self, tensor: torch.Tensor, category: Category, module: str) -> None:
        """Set the category of a tensor that is on the device, and the module that it is charged to."""
        self._mode_or_new().note(tensor, category, module)

    def freeze(self) -> list[LedgerEntry]:
        """End the accounting, and return one ledger entry per storage, with its final category and module.

        The allocator then keeps its state, even when the storages die.
        """
        self._attribute()
        return self._ledger.freeze()

    def block_of(self, tensor: torch.Tensor) -> LedgerEntry | None:
        """Return the ledger entry (block, size, category) of a tensor with one storage; None if not on the device."""
        return self._ledger.find(storage_key(tensor))

    def blocks(self) -> list[LedgerEntry]:
        """Return one ledger entry (block, size, category) for each storage that is on the device now."""
        return self._ledger.entries()

    @property
    def allocator(self) -> CachingAllocator:
        """The simulated allocator."""
        return self._allocator

    # --- reading its memory (the MemoryReader protocol)

    @property
    def name(self) -> str:
        """A name for people to read, such as ``"virtual device (24GiB, simulated)"``."""
        capacity = self._options["capacity"]
        size = format_size(capacity) if isinstance(capacity, int) else capacity
        return f"virtual device ({'no limit' if size is None else size}, simulated)"

    @property
    def simulated(self) -> bool:
        """Always True: the memory of this device is simulated."""
        return True

    def stats(self) -> MemoryStats:
        """Return the memory that is allocated and reserved now, the peaks, and the counts of retries and failures."""
        self._ledger.settle()
        return self._allocator.stats()

    def reset_peaks(self) -> None:
        """Set the peaks, and the bytes per category at the peak, to the current values."""
        self._ledger.reset_peaks()

    def empty_cache(self) -> None:
        """Release unused cached memory to the device."""
        self._ledger.empty_cache()

    def composition(self) -> Composition:
        """Return the allocated bytes, broken down by category and by module."""
        self._attribute()
        return composition_of(self._ledger)

    def composition_at_peak(self) -> Mapping[str, int]:
        """Return the bytes of each category at the peak since the last `reset_peaks`. They add up to this peak.

        The categories are those of the log tags: parameters, gradients, optimizer, activations, inputs and other.
        Buffers count as other.
        """
        self._attribute()
        return as_log_names(self._ledger.bytes_at_peak())

    @property
    def trace(self) -> AllocationTrace | None:
        """The events that the allocator has recorded; None unless the device was created with ``record=True``."""
        return self._allocator.trace

    @property
    def settings(self) -> AllocatorConfig:
        """The allocator's settings."""
        return self._allocator.config

    @property
    def cuda_like(self) -> bool:
        """True if dropout, autocast and optimizers behave as on CUDA."""
        return self._cuda_like

    @property
    def cublas_workspace(self) -> int:
        """The size of one cuBLAS workspace in bytes."""
        return self._cublas_workspace

    @property
    def context_bytes(self) -> int:
        """The part of the capacity that the CUDA context takes."""
        return self._context

    def record_history(self, max_entries: int | None = None) -> None:
        """Record the allocator's last actions from now on, for `snapshot`; ``max_entries=0`` stops the recording."""
        self._history = None if max_entries == 0 else AllocatorHistory(max_entries)
        self._allocator.observe(self._history)

    @property
    def history(self) -> AllocatorHistory | None:
        """The actions that `record_history` has recorded; None if nothing is recorded."""
        return self._history

    def snapshot(self) -> dict[str, Any]:
        """Return segments, blocks and the recorded history, in the form of ``torch.cuda.memory._snapshot``."""
        with self._ledger.still():
            return take_snapshot(self._allocator, self._history)

    def __getstate__(self) -> dict[str, Any]:
        return self._options

    def __setstate__(self, options: dict[str, Any]) -> None:
        VirtualDevice.__init__(self, **options)

    def __repr__(self) -> str:
        defaults = {"capacity": None, **(type(self).__init__.__kwdefaults__ or {})}
        given = ", ".join(f"{key}={value!r}" for key, value in self._options.items() if value != defaults[key])
        return f"VirtualDevice({given})"

    # --- internals

    def _leave(self) -> None:
        # Threads that are still running keep their mode, which no longer counts.
        for mode in self._modes:
            mode.silent += 1
        self._modes.clear()
        self._hooks.end()
        self._thread = None
        _active.remove(self)

    def reset_in_fork(self) -> None:
        """Reset the device as if it had never been entered, so that a forked process can enter it."""
        self._leave()
        VirtualDevice.__init__(self, **self._options)

    def _new_mode(self, run: RunOperator | None = None) -> AccountingMode:
        return AccountingMode(
            self._ledger,
            self._names,
            error_of=self._out_of_memory,
            cublas_workspace=self._cublas_workspace,
            cuda_like=self._cuda_like,
            gpu=self.gpu,
            rules=self._rules,
            run=run,
        )

    def _mode_or_new(self) -> AccountingMode:
        """Return this thread's accounting mode if this device is active; otherwise a new mode, still to be entered."""
        mode = _mode_here()
        return self._new_mode() if mode is None or VirtualDevice.current() is not self else mode

    def _enter_thread(self, run: RunOperator | None = None) -> AccountingMode:
        mode = self._new_mode(run)
        self._modes.append(mode)
        _here.mode = mode
        return mode

    def _run_counted(self, run: Callable[[], None]) -> None:
        """Run a thread's work, `run`, under a new accounting mode for that thread."""
        if self._thread is None:
            run()
            return
        mode = self._enter_thread()
        try:
            with mode:
                run()
        finally:
            _here.mode = None
            if mode in self._modes:
                self._modes.remove(mode)

    def _attribute(self) -> None:
        with self.host():
            attribute(self._ledger, self._names, list(self._optimizers))

    def _out_of_memory(self, failure: SimulatedOutOfMemory) -> torch.OutOfMemoryError:
        """Call the callbacks of `observe_oom`, and return the error to raise."""
        error = cuda_error(failure, context=self._context)
        for observe in list(self._observers.values()):
            try:
                observe(0, failure.segment_size, failure.capacity or 0, max(failure.free or 0, 0))
            except Exception as problem:  # noqa: BLE001, no error of an observer may hide the out-of-memory error
                error.add_note(f"An observer of this error failed: {problem!r}")
        return error


def _mode_here() -> AccountingMode | None:
    """Return the accounting mode of this thread; None if it has none."""
    return getattr(_here, "mode", None)


def _size_of(option: str, size: str | int) -> int:
    try:
        return parse_size(size)
    except ValueError as error:
        raise ValueError(f"{option}={size!r}: {error}") from None


def _fall_silent_in_fork() -> None:
    """Deactivate the device in a forked process, such as a DataLoader worker: its tensors are in host memory."""
    while _active:
        _active[0].reset_in_fork()
    _here.mode = None


os.register_at_fork(after_in_child=_fall_silent_in_fork)


def host_memory() -> AbstractContextManager[None]:
    """Return a context in which new tensors are host memory; it does nothing without an active virtual device."""
    device = VirtualDevice.current()
    return nullcontext() if device is None else device.host()


def put_on_device(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Put a model and its optimizers on the active VirtualDevice; do nothing if no device is active. Idempotent.

    Call this when fit, validation, test or predict begins, and again after optimizer state was restored.
    """
    device = VirtualDevice.current()
    if device is not None:
        device.track(model, *optimizers)
