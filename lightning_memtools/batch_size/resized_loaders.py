"""Copies of data loaders with another batch size, or with the largest samples in every batch."""

from __future__ import annotations

import copy
import heapq
import inspect
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset, Sampler, Subset

from lightning_memtools._torch import loader_with_batch_sampler, tree_leaves
from lightning_memtools.memory.loader_sizes import batch_size_of, n_samples_of
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.state.random_state import random_streams_restored
from lightning_memtools.state.state_snapshot import StateSnapshot

# Reading samples may take this long per data set; and this long where all samples so far have one size.
_SECONDS = 2.0
_SECONDS_OF_EQUALS = 0.5

WorstCase = Callable[[Any, int], Sequence[int]]
"""Return the indices of the n samples of a data set that take the most memory, largest first."""


class CannotResizeError(ValueError):
    """Raised for a loader whose batch size cannot be set from outside; the message says why, and what to change."""


def resize_loader(loader: Any, size: int) -> DataLoader[Any]:
    """Return a copy of a DataLoader that yields batches of `size`.

    Everything else is shared: the data set, the sampler and its generator are the same objects, and so are the collate
    function, the workers' settings and a subclass's attributes.

    Raises:
        CannotResizeError: The loader does not determine its batch size itself.
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


def known_sizes(loader: Any, worst_case: WorstCase | None) -> SampleSizes | None:
    """Return the sizes of a loader's samples; None if they are not needed or not known."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None or worst_case is not None or callable(getattr(loader.dataset, "worst_case", None)):
        return None
    lengths = _lengths(loader.dataset)
    return _measured(loader.dataset) if lengths is None else SampleSizes(dict(enumerate(lengths)), len(lengths))


def worst_first(loader: Any, worst_case: WorstCase | None, sizes: SampleSizes | None) -> Any:
    """Return the loader with the samples that take the most memory in every batch; itself where they are unknown.

    The batches are made by the loader's own collate function and workers. The largest samples come from the
    `worst_case` function, from a method `worst_case(n)` of the data set, or from the sizes.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    dataset, n = loader.dataset, batch_size_of(loader)
    if loader.batch_sampler is None or n is None:
        return loader
    method = getattr(dataset, "worst_case", None)
    if worst_case is not None or callable(method):
        indices = [int(index) for index in (method(n) if worst_case is None else worst_case(dataset, n))]  # type: ignore[misc]
    else:
        indices = sizes.largest(n) if sizes is not None and sizes.vary else []
    if not indices:
        return loader
    n_batches = math.ceil(max(n_samples_of(loader) or 0, n) / n)
    return loader_with_batch_sampler(loader, _Again(indices[:n], n_batches, n), loader.batch_size)


class _Again(Sampler[list[int]]):
    """Repeats one batch."""

    def __init__(self, batch: Sequence[int], n_batches: int, batch_size: int) -> None:
        self.batch = list(batch)
        self.n_batches = n_batches
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batch for _ in range(self.n_batches))


def _resized_sampler(loader: DataLoader[Any], batch_sampler: Any, size: int, described: str) -> Any:
    """Return a user's batch sampler with a new size: constructed anew if its arguments are known, copied otherwise."""
    kind, old = type(batch_sampler).__name__, getattr(batch_sampler, "batch_size", None)
    if not isinstance(old, int):
        raise CannotResizeError(
            f"The batch size of {described} cannot be set: its batch_sampler {kind} has no batch_size. Give it an int "
            "attribute batch_size that its batches follow."
        )
    names = [name for name in inspect.signature(type(batch_sampler).__init__).parameters if name != "self"]
    if "batch_size" in names and all(hasattr(batch_sampler, name) for name in names):
        given = {name: getattr(batch_sampler, name) for name in names}
        new = type(batch_sampler)(**(given | {"batch_size": size}))
    else:
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
    """The known sizes of the samples of one data set.

    Attributes:
        of: The size of each known sample by its index: the declared size, or the number of its values.
        n_samples: The number of samples in the data set.
        shapes: The shape of the largest tensor of each measured sample, by its index.
        are_measured: False if the data set declares the sizes.
    """

    of: Mapping[int, float]
    n_samples: int
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    are_measured: bool = False

    @property
    def vary(self) -> bool:
        """True if not all known samples have the same size."""
        return len(set(self.of.values())) > 1 or len(set(self.shapes.values())) > 1

    @property
    def are_complete(self) -> bool:
        """True if the size of every sample is known."""
        return len(self.of) >= self.n_samples

    def largest(self, n: int) -> list[int]:
        """Return the indices of the n largest samples, the largest first.

        Samples that are the largest in one dimension come before all others: a batch is padded in each of them.
        """
        n_dims = {len(shape) for shape in self.shapes.values()}
        dims = range(n_dims.pop()) if len(n_dims) == 1 else ()
        first = [max(self.shapes, key=lambda i, dim=dim: (self.shapes[i][dim], self.of[i])) for dim in dims]  # type: ignore[misc]
        return list(dict.fromkeys([*first, *heapq.nlargest(n, self.of, key=self.of.__getitem__)]))[:n]

    def described(self) -> str:
        """Return a sentence about the samples that are known."""
        sizes = self.of.values()
        read = "all" if self.are_complete else f"{len(self.of):,} of {self.n_samples:,}"
        return f"samples vary in size, from {min(sizes):g} to {max(sizes):g} values ({read} samples were looked at)"


def _lengths(dataset: Any) -> list[float] | None:
    """Return the sizes that a data set declares by its attribute `lengths`, also through Subset and ConcatDataset."""
    lengths = getattr(dataset, "lengths", None)
    if lengths is not None and hasattr(lengths, "__len__") and len(lengths) == len(dataset):
        return list(lengths.tolist() if hasattr(lengths, "tolist") else lengths)
    if isinstance(dataset, Subset):
        inner = _lengths(dataset.dataset)
        return None if inner is None else [inner[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [_lengths(part) for part in dataset.datasets]
        return None if None in parts else [length for part in parts for length in part or ()]
    return None


def _measured(dataset: Any) -> SampleSizes | None:
    """Return the sizes of samples that were read, in random order, as many as the time allows; None where none can be.

    Random streams are restored, and on a VirtualDevice the samples do not count.
    """
    try:
        n_samples = len(dataset)
    except TypeError:
        return None
    order = random.Random(0).sample(range(n_samples), min(n_samples, 10**5))  # noqa: S311, no secret
    sizes: dict[int, float] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    kinds: set[tuple[float, tuple[int, ...] | None]] = set()
    device = VirtualDevice.current()
    begin = time.perf_counter()
    with random_streams_restored(), torch.no_grad(), nullcontext() if device is None else device.host():
        for index in order:
            try:
                kind = _size_of(dataset[index])
            except Exception:  # noqa: BLE001, the user's code: the run itself will raise it where it matters
                return None
            kinds.add(kind)
            sizes[index], shape = kind
            if shape is not None:
                shapes[index] = shape
            if time.perf_counter() - begin > (_SECONDS_OF_EQUALS if len(kinds) == 1 else _SECONDS):
                break
    return SampleSizes(sizes, n_samples, shapes, are_measured=True)


def _size_of(sample: Any) -> tuple[float, tuple[int, ...] | None]:
    """Return the number of values of a sample, and the shape of its largest tensor."""
    total, largest = 0.0, None
    for leaf in tree_leaves(sample):
        tensors: list[Tensor] = list(tensors_in(leaf))
        total += sum(tensor.numel() for tensor in tensors) if tensors else _values_of(leaf)
        largest = max([*tensors, *([] if largest is None else [largest])], key=Tensor.numel, default=None)
    return total, None if largest is None else tuple(largest.shape)


def _values_of(leaf: Any) -> int:
    """Return the length of a text, the number of values of an array or of an image's points; 1 for anything else."""
    if isinstance(leaf, str | bytes):
        return len(leaf)
    size = getattr(leaf, "size", None)
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):
        return math.prod(size)
    return size if isinstance(size, int) else 1
