from __future__ import annotations

import math

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_memtools.batch_size.resized_loaders import known_sizes, resize_loader, worst_first
from lightning_memtools.memory.loader_sizes import batch_size_of, n_samples_of

DATA = TensorDataset(torch.arange(20.0))


def sizes(loader):
    return [len(batch[0]) if isinstance(batch, (list, tuple)) else len(batch) for batch in loader]


def test_only_the_size_changes():
    def collate(samples):
        return torch.stack([sample[0] for sample in samples])

    def start(worker):
        pass

    generator = torch.Generator().manual_seed(3)
    old = DataLoader(
        DATA, 4, shuffle=True, num_workers=2, collate_fn=collate, pin_memory=False, drop_last=True, timeout=7,
        worker_init_fn=start, generator=generator, prefetch_factor=5, persistent_workers=True,
    )  # fmt: skip
    new = resize_loader(old, 6)
    assert (old.batch_size, new.batch_size, new.batch_sampler.batch_size) == (4, 6, 6)
    for name in ("dataset", "sampler", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "generator",
                 "worker_init_fn", "prefetch_factor", "persistent_workers", "multiprocessing_context"):  # fmt: skip
        assert getattr(new, name) is getattr(old, name), name
    assert new.sampler.generator is generator


def test_a_sampler_of_ones_own_and_a_subclass_are_kept():
    class Mine(DataLoader):
        def __init__(self, path):
            super().__init__(DATA, 4, sampler=WeightedRandomSampler(torch.ones(20), 12))
            self.path = path

    new = resize_loader(Mine("here"), 5)
    assert isinstance(new, Mine)
    assert new.path == "here"
    assert isinstance(new.sampler, WeightedRandomSampler)
    assert sizes(new) == [5, 5, 2]
    assert n_samples_of(new) == 12


class Pairs(Sampler[list[int]]):
    """A batch sampler of one's own that reads its size when asked."""

    def __init__(self, sampler, batch_size, extra=1):
        self.sampler, self.batch_size, self.extra = sampler, batch_size, extra

    def __iter__(self):
        return iter(BatchSampler(self.sampler, self.batch_size, drop_last=False))

    def __len__(self):
        return math.ceil(len(self.sampler) / self.batch_size)


class Fixed(Sampler[list[int]]):
    """Makes up its batches in the constructor, from data that it does not keep."""

    def __init__(self, n, batch_size):
        self.batch_size = batch_size
        self.batches = [list(range(i, min(i + batch_size, n))) for i in range(0, n, batch_size)]

    def __iter__(self):
        return iter(self.batches)


def test_a_batch_sampler_with_a_batch_size():
    old = DataLoader(DATA, batch_sampler=Pairs(SequentialSampler(DATA), 4, extra=9))
    new = resize_loader(old, 8)
    assert sizes(new) == [8, 8, 4]
    assert new.batch_sampler.extra == 9
    assert batch_size_of(new) == 8
    assert sizes(old) == [4] * 5
    # A larger batch than the data set has no more samples, which does not mean that the sampler ignores its size.
    assert sizes(resize_loader(resize_loader(old, 20), 64)) == [20]


class Texts(Dataset[torch.Tensor]):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        n_words = (3, 9, 1, 7, 5)[index]
        return torch.full((n_words,), n_words)


class Declared(Texts):
    def worst_case(self, n):
        return [3, 1, 4][:n]


def firsts(samples):
    return [int(sample[0]) for sample in samples]


def test_the_largest_samples_come_first():
    for options in ({"batch_size": 2, "shuffle": True}, {"batch_sampler": Pairs(SequentialSampler(range(5)), 2)}):
        loader = DataLoader(Texts(), collate_fn=firsts, **options)
        largest = worst_first(loader, known_sizes(loader))
        assert list(largest) == [[9, 7]] * 3
    declared = DataLoader(Declared(), 2, collate_fn=firsts)
    assert known_sizes(declared) is None
    assert next(iter(worst_first(declared, None))) == [7, 9]
    equal = DataLoader(DATA, 2)
    assert known_sizes(equal) is None
    assert worst_first(equal, None) is equal
