"""Data loaders: a dataset is host memory, and so is all that happens until a batch is yielded."""

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
    """Count the batches that data loaders yield, and nothing else of theirs."""
    copies: weakref.WeakKeyDictionary[LoaderIterator, list[LedgerEntry]] = weakref.WeakKeyDictionary()

    def make_iter(original: Any) -> Any:
        def iterate(self: DataLoader[Any]) -> Any:
            mode = find()
            if mode is None:
                return original(self)
            mode.leave_on_host(tensors_in(self.dataset))
            # Silent: it draws a seed, and starts workers and threads that are no part of the device.
            with mode.silence():
                return original(self)

        return iterate

    def make_next(original: Any) -> Any:
        def fetch(self: LoaderIterator) -> Any:
            mode = find()
            # A loader inside a dataset: its batches stay on the host.
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
                # A loop lets go of a batch when it has the next one, or none. The dataset may hold these tensors for
                # good, but not their copies on the device.
                for entry in before:
                    # By identity: weak references are equal where what they refer to is.
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
    """Enter a batch as moving it to a GPU would: a storage where the batch has its own, or else a copy per tensor.

    Args:
        mode: The accounting mode of this thread.
        batch: What the loader yields.
        made: The storages made while it was fetched.
        from_workers: Whether worker processes sent it: then all its storages are its own.

    Returns:
        The copies.

    Raises:
        torch.OutOfMemoryError: The device has too little.
    """
    copies = []
    for tensor in tensors_in(batch):
        for part in parts(tensor):
            is_own = from_workers or storage_key(part) in made
            # A view of the dataset, or one of several views of one storage: a GPU would get a copy of just that.
            if is_own and part.numel() * part.element_size() == part.untyped_storage().nbytes():
                mode.enter_tensor(part, Category.INPUT)
            else:
                copies.append(mode.enter_copy(part, Category.INPUT))
    return [copy for copy in copies if copy is not None]
