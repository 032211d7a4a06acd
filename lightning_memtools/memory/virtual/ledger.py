"""The ledger of a virtual device: its storages, with the block and the category of each."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_memtools._torch import storage_id
from lightning_memtools.memory.allocator import Block, CachingAllocator
from lightning_memtools.memory.virtual.categories import Category


class LedgerEntry(weakref.ref[Any]):
    """A weak reference to a storage on the device, with its block. It tells the ledger when the storage dies.

    Attributes:
        key: The number by which the ledger identifies the storage.
        block: The storage's block in the allocator.
        n_bytes: The storage's size when the block was allocated.
        category: The purpose of the storage.
        module: The name of the module that the storage is charged to.
        serial: The block's number in the order of allocation.
    """

    # It subclasses the reference, which makes one object per storage in place of three.
    __slots__ = ("block", "category", "key", "module", "n_bytes", "serial")

    block: Block
    category: Category
    key: int
    module: str
    n_bytes: int
    serial: int


class DeviceListener:
    """Base class for listeners, which `VirtualDevice.listen` takes. Subclasses override the methods they need."""

    def on_operator(self, operator: Any) -> None:
        """Called before an operator runs."""

    def on_module(self, name: str) -> None:
        """Called when a module's call begins or ends. From then on, operators belong to the module `name`."""

    def on_allocation(self, block: Block, category: Category | None, module: str) -> None:
        """Called after a block was allocated. A library's workspace has no category (None)."""

    def on_free(self, block_id: int, category: Category | None, module: str) -> None:
        """Called after a block was freed, with the last category and module that were known."""


class VirtualLedger:
    """Keeps track of the storages on the device, the allocator's block for each, and the bytes per category.

    Storages die whenever Python or autograd releases them: in any thread, and even inside a method of the ledger, if
    the garbage collector runs there. So a dead storage is first put into a queue. If the ledger's lock is free, the
    storage's block is freed at once; otherwise the thread that has the lock frees it.

    Attributes:
        allocator: Allocates the blocks. Only the ledger may call its `malloc` and `free`.
        held: The bytes that belong to no storage (see `hold`).
        listener: The object whose methods are called at every allocation and free; None for no listener.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.held = 0
        self.listener: DeviceListener | None = None
        self._entries: dict[int, LedgerEntry] = {}
        self._dead: deque[LedgerEntry] = deque()
        self._lock = threading.Lock()
        self._serial = 0
        self._bytes = [0] * len(Category)
        self._peak = 0
        self._peak_serial = 0
        self._bytes_at_peak = list(self._bytes)

    def find(self, key: int) -> LedgerEntry | None:
        """Return the entry of the storage whose `storage_id` is `key`; None if the storage is not on the device."""
        if self._dead:
            self.settle()
        entry = self._entries.get(key)
        # A new storage can get the address of a dead one before another thread has freed the dead one's block.
        return None if entry is None or entry() is None else entry

    def entries(self) -> list[LedgerEntry]:
        """Return all live entries."""
        self.settle()
        return list(self._entries.values())

    def add(self, storage: torch.UntypedStorage, category: Category, module: str) -> LedgerEntry | None:
        """Return a storage's entry, and allocate a block for it first if it has none; None for an empty storage.

        Raises:
            SimulatedOutOfMemory: The device has too little memory.
        """
        n_bytes = storage.nbytes()
        if n_bytes == 0:
            return None
        return self._enter(storage, storage_id(storage), n_bytes, category, module)

    def add_copy(self, tensor: torch.Tensor, n_bytes: int, category: Category, module: str) -> LedgerEntry | None:
        """Allocate a block for a copy of a tensor. The block is freed when the tensor object (not its storage) dies.

        Raises:
            SimulatedOutOfMemory: The device has too little memory.
        """
        # Identities of Python objects and of storages are addresses, which live objects do not share. As a negative
        # number, the tensor's cannot equal that of a storage which is about to die either.
        return self._enter(tensor, -id(tensor), n_bytes, category, module) if n_bytes else None

    def hold(self, n_bytes: int) -> None:
        """Allocate a block that is never freed, such as a workspace of cuBLAS.

        Raises:
            SimulatedOutOfMemory: The device has too little memory.
        """
        with self._lock:
            self._settle()
            block = self.allocator.malloc(n_bytes, label="workspace")
            self._count(block, Category.OTHER, "workspace")
            self.held += block.size

    @contextmanager
    def workspaces(self) -> Iterator[tuple[Callable[..., None], Callable[..., None]]]:
        """Context manager for temporary blocks. Yields two functions: to allocate blocks, and to free blocks early.

        Both functions take any number of sizes in bytes, and ignore sizes of 0. The function that allocates raises
        SimulatedOutOfMemory if the device has too little memory.
        """
        taken: list[Block] = []

        def hold(*sizes: int) -> None:
            with self._lock:
                self._settle()
                for size in filter(None, sizes):
                    taken.append(block := self.allocator.malloc(size, label="workspace"))
                    self._count(block, Category.OTHER, "")
            self._settle_late()

        def release(*sizes: int) -> None:
            with self._lock:
                for size in filter(None, sizes):
                    taken.remove(block := next(one for one in reversed(taken) if one.requested == size))
                    number = block.id
                    self._bytes[Category.OTHER] -= block.size
                    self.allocator.free(block)
                    if self.listener is not None:
                        self.listener.on_free(number, None, "")
            self._settle_late()

        try:
            yield hold, release
        finally:
            release(*(block.requested for block in reversed(taken)))  # as C++ ends the life of locals

    def resize(self, entry: LedgerEntry, n_bytes: int) -> None:
        """Move a storage to a block of another size. The old block is freed after the new one is allocated, as on CUDA.

        Raises:
            SimulatedOutOfMemory: The device has too little memory.
        """
        if n_bytes == 0:
            self.forget(entry)
            return
        with self._lock:
            self._settle()
            block = self.allocator.malloc(n_bytes, label=entry.module)
            self._count(block, entry.category, entry.module)
            self._give_back(entry)
            entry.block = block
            entry.n_bytes = n_bytes
            entry.serial = self._serial
        self._settle_late()

    def assign(self, entry: LedgerEntry, category: Category, module: str | None = None) -> None:
        """Set a storage's category and module. If the storage existed at the peak, correct `bytes_at_peak`, too."""
        if module is not None:
            entry.module = module
        if entry.category is category:
            return
        with self._lock:
            was, size = entry.category, entry.block.size
            entry.category = category
            self._bytes[was] -= size
            self._bytes[category] += size
            if entry.serial <= self._peak_serial:
                self._bytes_at_peak[was] -= size
                self._bytes_at_peak[category] += size
        self._settle_late()

    def forget(self, entry: LedgerEntry) -> None:
        """Take a live storage off the device: it is host memory from now on."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                self._give_back(entry)
        self._settle_late()

    def freeze(self) -> list[LedgerEntry]:
        """Stop tracking storages, so that the allocator keeps its state, and return the live entries."""
        entries = self.entries()
        # A weak reference that is deleted itself calls no callback.
        self._entries.clear()
        return entries

    def settle(self) -> None:
        """Free the blocks of the storages that have died."""
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Return a context in which the allocator does not change, so that it can be read piece by piece.

        No other thread can allocate, and blocks of dead storages are freed afterwards. Python's garbage collector is
        off, because a finalizer that makes a tensor in this thread would wait for the lock forever.
        """
        was_on = gc.isenabled()
        gc.disable()
        try:
            with self._lock:
                self._settle()
                yield
        finally:
            if was_on:
                gc.enable()
        self._settle_late()

    def bytes_at_peak(self) -> list[int]:
        """Return the bytes per category at the peak since the last `reset_peaks`."""
        return list(self._bytes_at_peak)

    def reset_peaks(self) -> None:
        """Set the allocator's peaks, and the bytes per category at the peak, to the current values."""
        self.settle()
        with self._lock:
            self.allocator.reset_peaks()
            self._mark_peak()

    def empty_cache(self) -> None:
        """Release the unused cached memory to the device."""
        self.settle()
        with self._lock:
            self.allocator.empty_cache()

    def _enter(self, owner: object, key: int, n_bytes: int, category: Category, module: str) -> LedgerEntry:
        with self._lock:
            self._settle()
            known = self._entries.get(key)
            if known is not None:
                return known
            block = self.allocator.malloc(n_bytes, label=module)
            self._count(block, category, module)
            entry = LedgerEntry(owner, self._note_death)
            entry.key = key
            entry.block = block
            entry.n_bytes = n_bytes
            entry.category = category
            entry.module = module
            entry.serial = self._serial
            self._entries[key] = entry
        self._settle_late()
        return entry

    def _count(self, block: Block, category: Category, module: str) -> None:
        self._serial += 1
        self._bytes[category] += block.size
        if self.allocator.allocated > self._peak:
            self._mark_peak()
        if self.listener is not None:
            self.listener.on_allocation(block, None if block.label == "workspace" else category, module)

    def _mark_peak(self) -> None:
        self._peak = self.allocator.allocated
        self._peak_serial = self._serial
        self._bytes_at_peak = self._bytes.copy()

    def _note_death(self, entry: LedgerEntry) -> None:
        self._dead.append(entry)
        self.settle()

    def _settle(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                self._give_back(entry)

    def _settle_late(self) -> None:
        # Storages may have died while the lock was held.
        if self._dead:
            self.settle()

    def _give_back(self, entry: LedgerEntry) -> None:
        number = entry.block.id
        self._bytes[entry.category] -= entry.block.size
        self.allocator.free(entry.block)
        if self.listener is not None:
            self.listener.on_free(number, entry.category, entry.module)
