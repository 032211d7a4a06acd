from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memtools.batch_size.batch_size_result import SizeTrial
from lightning_memtools.batch_size.size_limits import SizeLimits
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
