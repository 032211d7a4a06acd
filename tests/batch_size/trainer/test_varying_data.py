"""Data whose samples differ in size, and that do not tell so: the size that is found fits in the whole fit."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, random_split

from lightning_memtools.batch_size.resized_loaders import worst_first
from lightning_memtools.batch_size.sample_sizes import declared_sizes, measured_sizes
from lightning_memtools.memory.oom_errors import is_out_of_memory
from tests.tuner_runs import Constant, Tuner, fit

N_SAMPLES = 600
STEP = 2048  # numbers per unit of length


def lengths_of(n, *, outliers):
    """Most samples are short; a few are long."""
    draw = random.Random(1)  # noqa: S311
    lengths = [draw.randint(2, 8) for _ in range(n)]
    for index in draw.sample(range(n), outliers):
        lengths[index] = draw.randint(14, 16)
    return lengths


class Texts(Dataset[Any]):
    def __init__(self, n=N_SAMPLES, outliers=8):
        self.n_words = lengths_of(n, outliers=outliers)

    def __len__(self):
        return len(self.n_words)

    def __getitem__(self, index):
        return torch.full((self.n_words[index] * STEP,), 0.5)


class Buckets(torch.utils.data.Sampler[Any]):
    """Batches of samples of similar length, in random order: the longest share a batch with shorter ones."""

    def __init__(self, lengths, batch_size):
        self.lengths = lengths
        self.batch_size = batch_size

    def __len__(self):
        return math.ceil(len(self.lengths) / self.batch_size)

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__, reverse=True)
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        return iter([batches[i] for i in torch.randperm(len(batches)).tolist()])


def padded(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class OfAnyLength(Constant):
    """Keeps a few activations of the batch's size."""

    def loss(self, x):
        scale = self.scale[:1]
        for _ in range(3):
            x = (x * scale).tanh()
        return x.square().mean()


def shuffled(size):
    return DataLoader(Texts(), size, shuffle=True, collate_fn=padded)


def in_buckets(size):
    texts = Texts()
    return DataLoader(texts, batch_sampler=Buckets(texts.n_words, size), collate_fn=padded)


def late_outliers(size):
    """In order, the long ones at the end."""
    texts = Texts(outliers=0)
    texts.n_words[-30:] = [16] * 30
    return DataLoader(texts, size, collate_fn=padded)


def runs(tmp_path, loader):
    try:
        fit(tmp_path, None, OfAnyLength(), loaders=loader, capacity=CAPACITY, limit_val_batches=0)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


CAPACITY = "96MiB"


@pytest.mark.parametrize("data", [shuffled, in_buckets, late_outliers])
def test_the_found_size_fits_in_the_whole_fit_and_is_near_the_largest_that_does(tmp_path, data):
    tuner = Tuner(stages=("train",), max_trials=8, margin=0.0)
    fit(tmp_path, tuner, OfAnyLength(), loaders=data(2), capacity=CAPACITY)
    found = tuner.result.sizes["train"]
    assert runs(tmp_path, data(found)), "found, and then run alone"
    high = max(int(found / 0.9) + 1, found + 1)
    # Any size beyond this one would make the found one less than 90% of the largest.
    assert not runs(tmp_path, data(high)), f"{high} fits, and {found} was found"
    assert any("vary in size" in note for note in tuner.result.notes)


def test_samples_that_could_not_all_be_read_are_told_of():
    sizes = measured_sizes(Texts(), seconds=0.0)
    assert not sizes.are_complete
    assert "1 of 600 samples were looked at" in sizes.described()


def test_equal_samples_are_not_said_to_vary_and_the_loader_stays():
    data = [torch.ones(3) for _ in range(10)]
    sizes = measured_sizes(data)
    assert not sizes.vary
    loader = DataLoader(data, 2)
    assert worst_first(loader, 2, None, sizes) is loader


def test_reading_samples_draws_no_random_numbers():
    class Draws(Texts):
        def __getitem__(self, index):
            return super().__getitem__(index) * torch.rand(1)

    before = torch.get_rng_state()
    assert measured_sizes(Draws()).vary
    assert torch.equal(before, torch.get_rng_state())


def test_lengths_are_told_through_parts_of_data_sets():
    class Tells(Texts):
        @property
        def lengths(self):
            return self.n_words

    data = Tells(20, outliers=2)
    part, rest = random_split(data, [5, 15])
    assert [declared_sizes(part).of[i] for i in range(5)] == [data.n_words[i] for i in part.indices]
    both = declared_sizes(ConcatDataset([rest, data]))
    assert both.of[15] == data.n_words[0]
    assert both.n_samples == 35
    longest = max(both.of, key=both.of.get)
    assert both.largest(1) == [longest]


def test_the_largest_in_each_dimension_come_first():
    shapes = [(3, 10, 10), (3, 30, 2), (3, 2, 30), (3, 15, 15)]
    sizes = measured_sizes([torch.zeros(shape) for shape in shapes])
    assert set(sizes.largest(2)) <= {1, 2, 3}
    assert set(sizes.largest(3)) == {1, 2, 3}


def test_a_stream_of_varying_shapes_is_told_of(tmp_path):
    class Stream(IterableDataset[Any]):
        def __iter__(self):
            return (torch.full((n * STEP,), 0.5) for n in lengths_of(64, outliers=4))

    tuner = Tuner(stages=("train",), max_trials=2, max_val=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tmp_path, tuner, OfAnyLength(), loaders=DataLoader(Stream(), 2, collate_fn=padded))
    assert any("batches vary in shape" in note for note in tuner.result.notes)
