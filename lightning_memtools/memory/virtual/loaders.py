"""Counts the batches that data loaders yield; data sets and all else that loaders make are host memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader

from lightning_memtools._torch import LoaderIterator, WorkerLoaderIterator
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.virtual.accounting_mode import AccountingMode, FindMode
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.ledger import LedgerEntry
from lightning_memtools.memory.virtual.patches import Patches
from lightning_memtools.memory.virtual.storages import parts, storage_key


def watch_loaders(patches: Patches, find: FindMode) -> None:
    """Patch DataLoader so that only its batches count as device memory. `find` returns a thread's accounting mode."""
    copies: weakref.WeakKeyDictionary[LoaderIterator, list[LedgerEntry]] = weakref.WeakKeyDictionary()

    def make_iter(original: Any) -> Any:
        def iterate(self: DataLoader[Any]) -> Any:
            mode = find()
            if mode is None:
                return original(self)
            mode.leave_on_host(tensors_in(self.dataset))
            # The iterator draws a seed and starts workers and threads, all in host memory.
            with mode.silence():
                return original(self)

        return iterate

    def make_next(original: Any) -> Any:
        def fetch(self: LoaderIterator) -> Any:
            mode = find()
            # The batches of a loader inside a dataset stay on the host.
            if mode is None or mode.silent:
                return original(self)
            made: set[int] = set()
            before = copies.pop(self, [])
            now: list[LedgerEntry] = []
            try:
                with mode.silence(made):
                    batch = original(self)
                now = count_batch(mode, batch, made, from_workers=isinstance(self, WorkerLoaderIterator))
            finally:
                # A loop frees a batch when it gets the next one, or none. The dataset may hold these tensors for good,
                # but not their copies on the device.
                for entry in before:
                    # Compared by identity, because weak references compare the objects that they refer to.
                    if all(entry is not kept for kept in now):
                        mode.drop(entry)
            copies[self] = now
            return batch

        return fetch

    patches.replace(DataLoader, "__init__", lambda original: _leaves_dataset_on_host(original, find))
    patches.replace(DataLoader, "__iter__", make_iter)
    patches.replace(LoaderIterator, "__next__", make_next)


def _leaves_dataset_on_host(original: Any, find: FindMode) -> Any:
    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        mode = find()
        if mode is not None:
            mode.leave_on_host(tensors_in(self.dataset))

    return init


def count_batch(mode: AccountingMode, batch: Any, made: set[int], *, from_workers: bool) -> list[LedgerEntry]:
    """Put a batch on the device: storages that nothing else uses are moved there, other tensors are copied.

    Args:
        mode: The accounting mode of this thread.
        batch: The batch.
        made: The keys of the storages that were made while the batch was fetched.
        from_workers: Whether worker processes sent the batch, so that nothing else uses its storages.

    Returns:
        The entries of the copies.

    Raises:
        torch.OutOfMemoryError: The device has too little memory.
    """
    copies = []
    for tensor in tensors_in(batch):
        for part in parts(tensor):
            is_own = from_workers or storage_key(part) in made
            # Of a view (of the dataset, or of a storage with several views) a GPU gets a copy of that part alone.
            if is_own and part.numel() * part.element_size() == part.untyped_storage().nbytes():
                mode.enter_tensor(part, Category.INPUT)
            else:
                copies.append(mode.enter_copy(part, Category.INPUT))
    return [copy for copy in copies if copy is not None]
