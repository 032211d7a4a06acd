"""Data whose samples differ in size, and that do not tell so: the size that is found fits in the whole fit."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_memtools.batch_size.resized_loaders import known_sizes
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


def test_reading_samples_draws_no_random_numbers():
    class Draws(Texts):
        def __getitem__(self, index):
            return super().__getitem__(index) * torch.rand(1)

    before = torch.get_rng_state()
    assert known_sizes(DataLoader(Draws())) is not None
    assert torch.equal(before, torch.get_rng_state())
