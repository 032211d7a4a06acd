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
from torch import Tensor
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
    """The batch size of a loader cannot be set from outside. The message says why, and what to change."""


def resize_loader(loader: Any, size: int) -> DataLoader[Any]:
    """Return a copy of a DataLoader that yields batches of `size`.

    The copy shares everything else with the original: the data set, the sampler and its generator, the collate
    function, the workers' settings and a subclass's attributes.

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
            "Let the DataLoader make them, or give the model or data module an attribute batch_size that the "
            "*_dataloader hook passes to the data set."
        )
    if type(batch_sampler) is BatchSampler:
        resized = BatchSampler(batch_sampler.sampler, size, batch_sampler.drop_last)
        return loader_with_batch_sampler(loader, resized, size)
    return loader_with_batch_sampler(loader, _resized_sampler(loader, batch_sampler, size, described), None)


def known_sizes(loader: Any) -> SampleSizes | None:
    """Return the sizes of a loader's samples; None if samples have no index or the data set defines `worst_case`."""
    if not _chooses_samples(loader) or callable(getattr(loader.dataset, "worst_case", None)):
        return None
    return _measured(loader.dataset)


def worst_first(loader: Any, sizes: SampleSizes | None) -> Any:
    """Return a copy of a loader in which every batch consists of the samples that take the most memory.

    The loader's own collate function and workers make the batches. The data set's method `worst_case(n)`
    names the largest samples; without this method, `sizes` does. If no samples are named, return the loader itself.
    """
    n = batch_size_of(loader)
    if n is None or not _chooses_samples(loader):
        return loader
    method = getattr(loader.dataset, "worst_case", None)
    if callable(method):
        indices = [int(index) for index in method(n)]
    else:
        indices = sizes.largest(n) if sizes is not None and sizes.vary else []
    if not indices:
        return loader
    n_batches = min(math.ceil(max(n_samples_of(loader) or 0, n) / n), _MOST_BATCHES)
    return loader_with_batch_sampler(loader, [indices[:n]] * n_batches, n)


def _chooses_samples(loader: Any) -> bool:
    """Return True for a DataLoader whose samples can be chosen by index, and whose data set does not make batches."""
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_map and loader.batch_sampler is not None


def _resized_sampler(loader: DataLoader[Any], batch_sampler: Any, size: int, described: str) -> Any:
    """Return a copy of a user's batch sampler with batch size `size`. `described` names the loader in errors."""
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
        of: The number of values (such as elements of tensors) in each sample, by its index.
        shapes: The shape of the largest tensor of each sample, by its index. Samples without tensors are left out.
        n_samples: The number of samples in the data set.
    """

    of: Mapping[int, float]
    shapes: Mapping[int, tuple[int, ...]]
    n_samples: int

    @property
    def vary(self) -> bool:
        """True if the samples that were read differ in size or shape."""
        return len(set(self.of.values())) > 1 or len(set(self.shapes.values())) > 1

    @property
    def are_complete(self) -> bool:
        """True if every sample was read."""
        return len(self.of) >= self.n_samples

    def largest(self, n: int) -> list[int]:
        """Return the indices of the n largest samples.

        The samples that are largest in one dimension come first, because a batch is padded in each dimension. All
        other samples follow, ordered by their number of values, largest first.
        """
        n_dims = {len(shape) for shape in self.shapes.values()}
        dims = range(n_dims.pop()) if len(n_dims) == 1 else ()
        first = [max(self.shapes, key=lambda i, dim=dim: (self.shapes[i][dim], self.of[i])) for dim in dims]  # type: ignore[misc]
        return list(dict.fromkeys([*first, *heapq.nlargest(n, self.of, key=self.of.__getitem__)]))[:n]

    def described(self) -> str:
        """Return a sentence about the samples that were read."""
        sizes = self.of.values()
        read = "all" if self.are_complete else f"{len(self.of):,} of {self.n_samples:,}"
        return f"samples vary in size, from {min(sizes):g} to {max(sizes):g} values ({read} samples were looked at)"


def _measured(dataset: Any) -> SampleSizes | None:
    """Read samples in random order for at most a second, and return their sizes; None if reading one fails.

    The state of the random generators is restored. The samples do not count as memory of a VirtualDevice.
    """
    try:
        n_samples = len(dataset)
    except TypeError:
        return None
    order = random.Random(0).sample(range(n_samples), min(n_samples, 10**5))  # noqa: S311, no secret
    sizes: dict[int, float] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    device = VirtualDevice.current()
    begin = time.perf_counter()
    with random_streams_restored(), torch.no_grad(), nullcontext() if device is None else device.host():
        for index in order:
            try:
                sizes[index], shape = _size_of(dataset[index])
            except Exception:  # noqa: BLE001, the user's code: the run itself will raise it where it matters
                return None
            if shape is not None:
                shapes[index] = shape
            if time.perf_counter() - begin > _SECONDS:
                break
    return SampleSizes(sizes, shapes, n_samples)


def _size_of(sample: Any) -> tuple[float, tuple[int, ...] | None]:
    """Return the number of values of a sample, and the shape of its largest tensor."""
    total, largest = 0.0, None
    for leaf in tree_leaves(sample):
        tensors: list[Tensor] = list(tensors_in(leaf))
        total += sum(tensor.numel() for tensor in tensors) if tensors else _values_of(leaf)
        largest = max([*tensors, *([] if largest is None else [largest])], key=Tensor.numel, default=None)
    return total, None if largest is None else tuple(largest.shape)


def _values_of(leaf: Any) -> int:
    """Return the length of a string, the size of an array, or the number of an image's pixels; 1 for other types."""
    if isinstance(leaf, str | bytes):
        return len(leaf)
    size = getattr(leaf, "size", None)
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):
        return math.prod(size)
    return size if isinstance(size, int) else 1
