"""Copies of data loaders with another batch size, or with the largest samples in every batch."""

from __future__ import annotations

import copy
import heapq
import math
import random
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_memtools._torch import loader_with_batch_sampler, tree_leaves
from lightning_memtools.memory.loader_sizes import batch_size_of, n_samples_of
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.state.random_state import random_streams_restored
from lightning_memtools.state.state_snapshot import StateSnapshot

# Reading samples may take this long per data set. Most data sets have samples of one size, and wait for nothing.
_SECONDS = 1.0
# More than any trial runs.
_MOST_BATCHES = 1000


class CannotResizeError(ValueError):
    """Raised if the batch size of a loader cannot be changed. The message says why, and what to do about it."""


def resize_loader(loader: Any, size: int) -> DataLoader[Any]:
    """Return a copy of a DataLoader that yields batches of `size` samples.

    The copy shares everything else with the original: the data set, the sampler and its generator, the collate
    function, the settings of workers and the attributes of a subclass.

    Raises:
        CannotResizeError: `loader` is not a DataLoader, or its data set or batch sampler fixes the batch size.
    """
    if not isinstance(loader, DataLoader):
        raise CannotResizeError(
            f"The batch size of a {type(loader).__name__} cannot be set: it is not a torch.utils.data.DataLoader. Pass "
            "a DataLoader, or give the model or data module an attribute batch_size that its *_dataloader hook uses."
        )
    described = f"the {type(loader).__name__} over {type(loader.dataset).__name__}"
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        raise CannotResizeError(
            f"The batch size of {described} cannot be set: it has batch_size=None, so its data set makes the batches. "
            "Let the DataLoader make them, or let a *_dataloader hook pass an attribute batch_size to the data set."
        )
    if type(batch_sampler) is BatchSampler:
        resized = BatchSampler(batch_sampler.sampler, size, batch_sampler.drop_last)
        return loader_with_batch_sampler(loader, resized, size)
    return loader_with_batch_sampler(loader, _resized_sampler(loader, batch_sampler, size, described), None)


def known_sizes(loader: Any) -> SampleSizes | None:
    """Return the sizes of a loader's samples, to choose the largest; None if all are equal or cannot be read."""
    if not _chooses_samples(loader) or callable(getattr(loader.dataset, "worst_case", None)):
        return None
    sizes = _measured(loader.dataset)
    return sizes if sizes is not None and len(set(sizes.of.values())) > 1 else None


def worst_first(loader: Any, sizes: SampleSizes | None) -> Any:
    """Return a copy of a loader in which every batch consists of the samples that take the most memory.

    A data set can name the indices of these samples in a method `worst_case(n)`. Without the method, the largest
    samples according to `sizes` are taken. If there are no `sizes` either, return the loader itself.
    """
    n = batch_size_of(loader)
    if n is None or not _chooses_samples(loader):
        return loader
    method = getattr(loader.dataset, "worst_case", None)
    if callable(method):
        indices = [int(index) for index in method(n)]
    elif sizes is not None:
        indices = sizes.largest(n)
    else:
        return loader
    n_batches = min(math.ceil(max(n_samples_of(loader) or 0, n) / n), _MOST_BATCHES)
    return loader_with_batch_sampler(loader, [indices[:n]] * n_batches, n)


def _chooses_samples(loader: Any) -> bool:
    """Return True for a DataLoader that reads single samples by index and makes the batches itself."""
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_map and loader.batch_sampler is not None


def _resized_sampler(loader: DataLoader[Any], batch_sampler: Any, size: int, described: str) -> Any:
    """Return a copy of a custom batch sampler with a new batch size. `described` is the loader's name in errors."""
    kind, old = type(batch_sampler).__name__, getattr(batch_sampler, "batch_size", None)
    if not isinstance(old, int):
        raise CannotResizeError(
            f"The batch size of {described} cannot be set: its batch_sampler {kind} has no batch_size. Give it an int "
            "attribute batch_size that its batches follow."
        )
    new = copy.copy(batch_sampler)
    new.batch_size = size
    # Only a batch shows that the size had an effect: the batches may have been formed in the constructor.
    before = StateSnapshot([batch_sampler])
    first = len(list(next(iter(new), [])))
    before.restore()
    if first == old != min(size, n_samples_of(loader) or size):
        raise CannotResizeError(
            f"The batch size of {described} cannot be set: its batch_sampler {kind} still gives {first} samples with "
            f"batch_size={size}. Let it read self.batch_size when it is iterated over."
        )
    return new


# --- sizes of samples


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """The sizes of the samples that were read from a data set.

    Attributes:
        of: The size of each sample, by its index: the number of values in it, such as elements of tensors.
        n_samples: The number of samples in the data set.
    """

    of: Mapping[int, int]
    n_samples: int

    def largest(self, n: int) -> list[int]:
        """Return the indices of the n largest samples, the largest first."""
        return heapq.nlargest(n, self.of, key=self.of.__getitem__)

    def described(self) -> str:
        """Return a phrase that says how the samples vary in size, and how many of them were read."""
        sizes = self.of.values()
        read = f"{len(sizes):,} of {self.n_samples:,} samples were looked at"
        return f"samples vary in size, from {min(sizes)} to {max(sizes)} values ({read})"


def _measured(dataset: Any) -> SampleSizes | None:
    """Read samples in random order for at most a second, and return their sizes; None if reading one fails.

    The state of the random generators is restored. On a simulated device, memory used for reading is not counted.
    """
    try:
        n_samples = len(dataset)
    except TypeError:
        return None
    order = random.Random(0).sample(range(n_samples), min(n_samples, 10**5))  # noqa: S311, no secret
    sizes: dict[int, int] = {}
    device = VirtualDevice.current()
    begin = time.perf_counter()
    with random_streams_restored(), torch.no_grad(), nullcontext() if device is None else device.host():
        for index in order:
            try:
                sizes[index] = sum(map(_values_of, tree_leaves(dataset[index])))
            except Exception:  # noqa: BLE001, the user's code: the run itself will raise it where it matters
                return None
            if time.perf_counter() - begin > _SECONDS:
                break
    return SampleSizes(sizes, n_samples)


def _values_of(leaf: Any) -> int:
    """Return the number of elements of a tensor or array, or the length of a string; 1 for other types."""
    tensors = list(tensors_in(leaf))
    if tensors:
        return sum(tensor.numel() for tensor in tensors)
    size = len(leaf) if isinstance(leaf, str | bytes) else getattr(leaf, "size", None)
    return size if isinstance(size, int) else 1
