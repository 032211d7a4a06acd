"""The sizes of a data set's samples: declared by the data set, or measured by reading samples for a short time."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lightning_memtools._torch import tree_leaves
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.state.random_state import random_streams_restored

# Reading samples may take this long per data set; and this long where all samples so far have one size.
_SECONDS = 2.0
_SECONDS_OF_EQUALS = 0.5


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
    are_measured: bool = True

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
        first: list[int] = []
        n_dims = {len(shape) for shape in self.shapes.values()}
        if len(n_dims) == 1:
            for dim in range(n_dims.pop()):
                longest = max(self.shapes, key=lambda index: (self.shapes[index][dim], self.of[index]))
                first += [] if longest in first else [longest]
        rest = heapq.nlargest(n + len(first), self.of, key=self.of.__getitem__)
        return [*first, *(index for index in rest if index not in first)][:n]

    def largest_batch(self, batches: Sequence[Sequence[int]]) -> Sequence[int]:
        """Return the batch that takes the most memory when its samples are padded to the longest of them."""

        def padded(batch: Sequence[int]) -> tuple[float, float]:
            sizes = [self.of.get(index, 0.0) for index in batch]
            return len(sizes) * max(sizes, default=0.0), sum(sizes)

        return max(batches, key=padded)

    def described(self) -> str:
        """Return a sentence about the samples that are known."""
        sizes = self.of.values()
        read = "all" if self.are_complete else f"{len(self.of):,} of {self.n_samples:,}"
        return f"samples vary in size, from {min(sizes):g} to {max(sizes):g} values ({read} samples were looked at)"


def declared_sizes(dataset: Any) -> SampleSizes | None:
    """Return the sizes that a data set declares by its attribute `lengths`, also through Subset and ConcatDataset."""
    lengths = _lengths(dataset)
    return None if lengths is None else SampleSizes(dict(enumerate(lengths)), len(lengths), are_measured=False)


def measured_sizes(dataset: Any, seconds: float = _SECONDS) -> SampleSizes | None:
    """Return the sizes of samples that were read, in random order, as many as the time allows; None where none can be.

    Random streams are restored, and on a VirtualDevice the samples do not count.
    """
    try:
        n_samples = len(dataset)
    except TypeError:
        return None
    order = list(range(n_samples)) if n_samples <= 10**6 else random.Random(0).sample(range(n_samples), 10**5)  # noqa: S311
    random.Random(0).shuffle(order)  # noqa: S311, no secret
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
            if time.perf_counter() - begin > (min(seconds, _SECONDS_OF_EQUALS) if len(kinds) == 1 else seconds):
                break
    return SampleSizes(sizes, n_samples, shapes)


def _lengths(dataset: Any) -> list[float] | None:
    lengths = getattr(dataset, "lengths", None)
    if lengths is not None and not callable(lengths) and hasattr(lengths, "__len__") and len(lengths) == len(dataset):
        return list(lengths.tolist() if hasattr(lengths, "tolist") else lengths)
    if isinstance(dataset, Subset):
        inner = _lengths(dataset.dataset)
        return None if inner is None else [inner[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [_lengths(one) for one in dataset.datasets]
        return None if None in parts else [length for part in parts for length in part or ()]
    return None


def _size_of(sample: Any) -> tuple[float, tuple[int, ...] | None]:
    """Return the number of values of a sample, and the shape of its largest tensor."""
    total = 0
    largest: Tensor | None = None
    for leaf in tree_leaves(sample):
        if isinstance(leaf, (str, bytes)):
            total += len(leaf)
            continue
        tensors = list(tensors_in(leaf))
        for tensor in tensors:
            total += tensor.numel()
            if largest is None or tensor.numel() > largest.numel():
                largest = tensor
        if not tensors:
            total += _size_of_array(leaf)
    return float(total), None if largest is None else tuple(largest.shape)


def _size_of_array(leaf: Any) -> int:
    """Return the number of values of an array or of an image's points; 1 for anything else."""
    size = getattr(leaf, "size", None)
    if isinstance(size, tuple) and all(isinstance(one, int) for one in size):
        return math.prod(size)
    return size if isinstance(size, int) else 1
