"""The sizes that a loader declares: samples per batch, samples per epoch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def _batch_sampler_of(loader: Any) -> Any:
    """Return the sampler that yields the indices of each batch; None if the loader has no such sampler."""
    sampler = getattr(loader, "batch_sampler", None)
    # With batch_size=None a sampler may give whole batches of indices, to data sets that read many samples at once.
    by_batches = getattr(loader, "sampler", None)
    return by_batches if sampler is None and hasattr(by_batches, "batch_size") else sampler


def batch_size_of(loader: Any) -> int | None:
    """Return the number of samples per batch; None if the loader does not declare it."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(_batch_sampler_of(loader), "batch_size", None)
    return size if isinstance(size, int) else None


def n_samples_of(loader: Any) -> int | None:
    """Return the number of samples per epoch on this rank; None if unknown, as for an iterable data set."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = getattr(_batch_sampler_of(loader), "sampler", loader.sampler)
    try:
        return len(sampler)
    except TypeError:
        return None


def drops_last(loader: Any) -> bool:
    """Return True if the loader leaves out an incomplete last batch."""
    return bool(getattr(_batch_sampler_of(loader), "drop_last", getattr(loader, "drop_last", False)))
