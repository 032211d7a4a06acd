"""The largest batch: the search for it, and where it ends."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memtools.batch_size.batch_size_result import SizeTrial
from lightning_memtools.batch_size.size_limits import SizeLimits, TunerSettings
from lightning_memtools.batch_size.size_search import find_largest, largest_that_fits

MIB = 1 << 20


class Device:
    """Runs sizes on a formula: allocated bytes by size, a capacity, and what is reserved beyond."""

    def __init__(self, allocated, capacity, *, margin=0.05, slack=lambda n: 0, base=0, tells=True):
        self.allocated, self.capacity, self.margin, self.slack = allocated, capacity, margin, slack
        self.base, self.tells = base, tells
        self.ran: list[int] = []

    def run(self, size):
        self.ran.append(size)
        allocated = int(self.allocated(size))
        peak = allocated + int(self.slack(size))
        failure = "out of memory" if peak > self.capacity else ""
        if not self.tells:
            return SizeTrial(stage="train", size=size, failure=failure)
        return SizeTrial(
            stage="train", size=size, peak=min(peak, self.capacity), limit=int(self.capacity * (1 - self.margin)),
            peak_allocated=allocated, batch_allocated=allocated, base_allocated=self.base, failure=failure,
        )  # fmt: skip

    def search(self, limits=None, start=2, max_trials=8):
        trials = find_largest(self.run, start=[start], limits=limits or SizeLimits(), max_trials=max_trials)
        found = largest_that_fits(trials)
        return 0 if found is None else found.size


def test_small_maxima_are_found_exactly():
    for maximum in range(3, 20):
        device = Device(lambda n: 100 * MIB + n * 20 * MIB, (100 + maximum * 20 + 10) * MIB, margin=0, base=100 * MIB)
        assert device.search() == maximum
        assert len(device.ran) <= 4


def test_without_reported_peaks_sizes_are_doubled_and_halved():
    device = Device(lambda n: n * MIB, 100 * MIB, tells=False)
    assert device.search(max_trials=30) >= 95
    assert device.ran[:4] == [2, 4, 8, 16]


def test_nothing_fits():
    device = Device(lambda n: 200 * MIB + n * MIB, 100 * MIB)
    assert device.search() == 0
    assert 1 in device.ran
    assert len(device.ran) <= 3


@settings(max_examples=300, deadline=None)
@given(
    base=st.integers(0, 500),
    per_sample=st.floats(0.01, 60),
    bend=st.floats(0, 0.05),
    lumps=st.integers(0, 12),
    multiple=st.integers(1, 8),
    start=st.integers(1, 64),
    max_trials=st.integers(1, 12),
)
def test_the_returned_size_was_run_and_fits(  # noqa: PLR0917, hypothesis names them
    base, per_sample, bend, lumps, multiple, start, max_trials
):
    device = Device(
        lambda n: (base + per_sample * n + bend * n * n) * MIB,
        1000 * MIB,
        slack=lambda n: (n * 7919 % (lumps + 1)) * MIB,
        base=base * MIB,
    )
    limits = SizeLimits(multiple_of=multiple, n_samples=100_000)
    found = device.search(limits, start, max_trials)
    assert len(device.ran) <= max_trials
    assert len(set(device.ran)) == len(device.ran), "no size is run twice"
    assert all(size % multiple == 0 for size in device.ran)
    if found:
        assert found in device.ran
        assert device.run(found).fits


@settings(max_examples=200, deadline=None)
@given(base=st.integers(0, 500), per_sample=st.floats(0.05, 60), bend=st.sampled_from([0.0, 0.0, 0.0, 0.01]))
def test_the_share_of_the_true_maximum(base, per_sample, bend):
    device = Device(lambda n: (base + per_sample * n + bend * n * n) * MIB, 8000 * MIB, base=base * MIB)
    limit = 7600 - base
    root = limit / per_sample if not bend else (-per_sample + math.sqrt(per_sample**2 + 4 * bend * limit)) / (2 * bend)
    found = device.search()
    assert 0.95 * math.floor(root) <= found + 1e-9
    assert found <= root
    if not bend:
        assert len(device.ran) <= 4


@pytest.mark.parametrize("size", [1, 2, 5, 17, 33, 64, 100, 1000])
def test_rounding_down_is_the_largest_admitted_size(size):
    cases = [
        (SizeLimits(multiple_of=8), lambda n: n % 8 == 0),
        (SizeLimits(max_val=50), lambda n: n <= 50),
        (SizeLimits(per_rank=96), lambda n: 96 % n == 0),
        (SizeLimits(per_rank=96, multiple_of=16), lambda n: 96 % n == 0 and n % 16 == 0),
        (SizeLimits(n_samples=33), lambda n: n <= 33),
        (SizeLimits(n_samples=100, min_batches=4), lambda n: n <= 25),
        (SizeLimits(n_samples=65, avoid_single=True), lambda n: n <= 65 and n > 1 and 65 % n != 1),
        (SizeLimits(n_samples=65, avoid_single=True, drop_last=True), lambda n: 1 < n <= 65),
    ]
    for limits, admitted in cases:
        assert limits.round_down(size) == max(filter(admitted, range(1, size + 1)), default=0), limits


def test_ranks_share_an_effective_batch_evenly():
    arguments = {"batch_arg_name": "n", "margin": 0.0, "init_val": None, "max_val": None, "multiple_of": 1}
    settings = partial(TunerSettings, **arguments, stages=("train",), max_trials=1)
    assert settings(effective_batch_size=96).per_rank(3) == 32
    with pytest.raises(ValueError, match=r"effective_batch_size=100 must be a multiple of the 3 ranks"):
        settings(effective_batch_size=100).per_rank(3)
