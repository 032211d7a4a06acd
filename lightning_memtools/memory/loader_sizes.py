"""The sizes that a loader declares: samples per batch, samples per epoch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def batch_size_of(loader: Any) -> int | None:
    """Return the samples per batch; None where the loader does not say."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def n_samples_of(loader: Any) -> int | None:
    """Return the samples per epoch on this rank; None if unknown, as for an iterable data set."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    try:
        return len(sampler)  # type: ignore[arg-type]
    except TypeError:
        return None


def drops_last(loader: Any) -> bool:
    """Return True if the loader leaves out an incomplete last batch."""
    return bool(getattr(getattr(loader, "batch_sampler", None), "drop_last", getattr(loader, "drop_last", False)))
