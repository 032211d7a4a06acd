"""Copies of data loaders with another batch size, or with the largest samples first."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from lightning_memtools._torch import loader_with_batch_sampler
from lightning_memtools.batch_size.sample_sizes import SampleSizes, declared_sizes, measured_sizes
from lightning_memtools.memory.loader_sizes import batch_size_of, n_samples_of
from lightning_memtools.state.random_state import random_streams_restored

_PASSES = 4
_SECONDS_OF_BATCHES = 0.5

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
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        raise CannotResizeError(
            f"The batch size of {_described(loader)} cannot be set: it has batch_size=None, so its data set makes the "
            "batches. Let the DataLoader make them, or give the model or data module an attribute batch_size that the "
            "*_dataloader hook passes to the data set."
        )
    if type(batch_sampler) is BatchSampler:
        return loader_with_batch_sampler(
            loader, BatchSampler(batch_sampler.sampler, size, batch_sampler.drop_last), size
        )
    return loader_with_batch_sampler(loader, _resized_sampler(loader, batch_sampler, size), None)


def known_sizes(loader: Any, worst_case: WorstCase | None) -> SampleSizes | None:
    """Return the sizes of a loader's samples; None if they are not needed or not known."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None or worst_case is not None or callable(getattr(loader.dataset, "worst_case", None)):
        return None
    return declared_sizes(loader.dataset) or measured_sizes(loader.dataset)


def worst_first(loader: Any, n: int, worst_case: WorstCase | None, sizes: SampleSizes | None = None) -> Any:
    """Return the loader with only the batch that takes the most memory; the loader itself where that is unknown.

    The largest samples come from the `worst_case` function, from a method `worst_case(n)` of the data set, or from the
    sizes. A batch sampler of the user's is asked for its batches, and the largest of these is taken.

    Args:
        loader: The loader.
        n: The number of samples that the batches of all ranks hold together.
        worst_case: Returns the largest samples; None where there is no such function.
        sizes: The sizes of the samples; None for those that the data set tells.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    sizes = sizes or declared_sizes(loader.dataset)
    batch_sampler, size = loader.batch_sampler, batch_size_of(loader)
    if batch_sampler is None or size is None:
        return loader
    if sizes is not None and sizes.vary and type(batch_sampler) is not BatchSampler:
        batches = _batches_of(batch_sampler)
        if batches:
            again = _Again(sizes.largest_batch(batches), len(batches), size, getattr(batch_sampler, "sampler", None))
            return loader_with_batch_sampler(loader, again, None)
    indices = _worst_indices(loader.dataset, n, worst_case, sizes)
    if not indices:
        return loader
    n_rest = max(n_samples_of(loader) or 0, len(indices))
    return loader_with_batch_sampler(
        loader, BatchSampler(_Cycle(indices, n_rest), size, drop_last=False), loader.batch_size
    )


class _Cycle(Sampler[int]):
    """Repeats the same indices, so that every batch of a trial is the largest one."""

    def __init__(self, indices: Sequence[int], length: int) -> None:
        self.indices = indices
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return (self.indices[i % len(self.indices)] for i in range(self.length))


class _Again(Sampler[list[int]]):
    """Repeats one batch. Declares the batch size and the sampler of the batch sampler that it comes from."""

    def __init__(self, batch: Sequence[int], n_batches: int, batch_size: int, sampler: Any) -> None:
        self.batch = list(batch)
        self.n_batches = n_batches
        self.batch_size = batch_size
        self.sampler = range(n_batches * batch_size) if sampler is None else sampler

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batch for _ in range(self.n_batches))


def _batches_of(batch_sampler: Any) -> list[Sequence[int]]:
    """Return the batches of a few passes over a batch sampler: where it shuffles, each pass has others."""
    end = time.perf_counter() + _SECONDS_OF_BATCHES
    batches: list[Sequence[int]] = []
    with _streams_of(batch_sampler):
        for _ in range(_PASSES):
            for batch in batch_sampler:
                batches.append(batch)
                if time.perf_counter() > end:
                    break
    are_indices = all(isinstance(index, int) for batch in batches[:1] for index in batch)
    return batches if are_indices else []


def _worst_indices(dataset: Any, n: int, worst_case: WorstCase | None, sizes: SampleSizes | None) -> list[int]:
    if worst_case is not None:
        return [int(index) for index in worst_case(dataset, n)]
    if callable(getattr(dataset, "worst_case", None)):
        return [int(index) for index in dataset.worst_case(n)]
    return sizes.largest(n) if sizes is not None and sizes.vary else []


def _resized_sampler(loader: DataLoader[Any], batch_sampler: Any, size: int) -> Any:
    """Return a user's batch sampler with a new size: constructed anew if its arguments are known, copied otherwise."""
    kind = type(batch_sampler).__name__
    old = getattr(batch_sampler, "batch_size", None)
    if not isinstance(old, int):
        raise CannotResizeError(
            f"The batch size of {_described(loader)} cannot be set: its batch_sampler {kind} has no batch_size. Give "
            "it an int attribute batch_size that its batches follow."
        )
    new = _made_anew(batch_sampler, size)
    if new is None:
        new = copy.copy(batch_sampler)
        new.batch_size = size
    # Only a batch shows that the size had an effect: the batches may have been formed in the constructor.
    with _streams_of(batch_sampler):
        first = len(list(next(iter(new), [])))
    if size != old and first == old:
        raise CannotResizeError(
            f"The batch size of {_described(loader)} cannot be set: its batch_sampler {kind} still gives {first} "
            f"samples with batch_size={size}. Let it read self.batch_size when it is iterated over."
        )
    return new


def _made_anew(batch_sampler: Any, size: int) -> Any:
    parameters = inspect.signature(type(batch_sampler).__init__).parameters
    names = [name for name in parameters if name != "self"]
    if "batch_size" not in names or not all(hasattr(batch_sampler, name) for name in names):
        return None
    given = {name: getattr(batch_sampler, name) for name in names}
    return type(batch_sampler)(**(given | {"batch_size": size}))


@contextmanager
def _streams_of(batch_sampler: Any) -> Iterator[None]:
    """Restore the process's random streams, and the generators of a batch sampler and its sampler."""
    owners = (batch_sampler, getattr(batch_sampler, "sampler", None))
    values = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    states = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
    with random_streams_restored():
        yield
    for generator, state in states:
        generator.set_state(state)


def _described(loader: DataLoader[Any]) -> str:
    return f"the {type(loader).__name__} over {type(loader.dataset).__name__}"
