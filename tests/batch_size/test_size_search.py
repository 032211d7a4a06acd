from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memtools.batch_size.batch_size_result import RankReading, SizeTrial
from lightning_memtools.batch_size.size_limits import SizeLimits
from lightning_memtools.batch_size.size_search import find_largest, largest_that_fits

MIB = 1 << 20


class Device:
    """Runs sizes on a formula: allocated bytes by size, a capacity, and what is reserved beyond."""

    def __init__(self, allocated, capacity, *, margin=0.05, slack=lambda n: 0, base=0, ranks=1, tells=True):
        self.allocated, self.capacity, self.margin, self.slack = allocated, capacity, margin, slack
        self.base, self.ranks, self.tells = base, ranks, tells
        self.ran: list[int] = []

    def reading(self, size, capacity):
        allocated = int(self.allocated(size))
        peak = allocated + int(self.slack(size))
        limit = int(capacity * (1 - self.margin))
        failure = "out of memory" if peak > capacity else ""
        if not self.tells:
            return RankReading(failure=failure)
        return RankReading(peak=min(peak, capacity), limit=limit, peak_allocated=allocated, batch_allocated=allocated,
                       base_allocated=self.base, failure=failure)  # fmt: skip

    def run(self, size):
        self.ran.append(size)
        capacities = [self.capacity, self.capacity // 2][: self.ranks]
        return SizeTrial(stage="train", size=size, readings=[self.reading(size, capacity) for capacity in capacities])

    def search(self, limits=None, start=2, max_trials=8, precision=0.025):
        limits = limits or SizeLimits()
        trials = find_largest(
            self.run,
            start=[start],
            round_down=limits.round_down,
            smallest=limits.smallest,
            max_trials=max_trials,
            precision=precision,
        )
        found = largest_that_fits(trials)
        return 0 if found is None else found.size


def test_small_maxima_are_found_exactly():
    for maximum in range(3, 33):
        device = Device(lambda n: 100 * MIB + n * 20 * MIB, (100 + maximum * 20 + 10) * MIB, margin=0, base=100 * MIB)
        assert device.search() == maximum
        assert len(device.ran) <= 4


def test_without_reported_peaks_sizes_are_doubled_and_halved():
    device = Device(lambda n: n * MIB, 100 * MIB, tells=False)
    assert device.search(max_trials=30) >= 97
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
    assert 0.97 * math.floor(root) <= found + 1e-9
    assert found <= root
    if not bend:
        assert len(device.ran) <= 4


class SmallDevice:
    """A few weights and tensors of a batch in the segments of a caching allocator, on a device of 64 to 900 MiB."""

    def __init__(self, draw):
        self.per_sample = [
            draw.uniform(0.002, 1.5) * MIB * draw.choice([1, 1, 0.1]) for _ in range(draw.randint(3, 20))
        ]
        self.weights = [draw.uniform(0.1, 8) * MIB for _ in range(draw.randint(2, 8))]
        self.capacity = draw.choice([64, 96, 128, 192, 256, 512, 900]) * MIB
        self.limit = int(0.95 * self.capacity)

    def peaks(self, size):
        """Allocated and reserved: tensors below 10 MiB share segments of 2 or 20 MiB, larger ones have their own."""
        tensors = self.weights + [one * size for one in self.per_sample]
        reserved, rooms = 0, []
        for one in tensors:
            segment = 2 * MIB if one < MIB else 20 * MIB
            if one >= 10 * MIB:
                reserved += -int(-one // (2 * MIB)) * 2 * MIB
                continue
            for room in rooms:
                if room[1] >= one and (room[0] == segment or one >= MIB):
                    room[1] -= one
                    break
            else:
                reserved += segment
                rooms.append([segment, segment - one])
        return int(sum(tensors)), reserved

    def run(self, size):
        allocated, reserved = self.peaks(size)
        failure = "out of memory" if reserved > self.capacity else ""
        reading = RankReading(
            peak=min(reserved, self.capacity),
            limit=self.limit,
            peak_allocated=allocated,
            batch_allocated=allocated,
            base_allocated=int(sum(self.weights)),
            failure=failure,
        )
        return SizeTrial(stage="train", size=size, readings=[reading])

    def largest_from(self, size):
        """The largest size up to which every size from this one on fits."""
        while self.peaks(size + 1)[1] <= self.limit:
            size += 1
        return size


def test_eight_trials_come_near_on_devices_of_a_few_segments():
    """With a precision of 5%, from the configured size on."""
    shares = []
    for seed in range(3000):
        device = SmallDevice(random.Random(seed))  # noqa: S311
        if device.peaks(20)[1] > device.limit:
            continue
        trials = find_largest(
            device.run, start=[16], round_down=SizeLimits().round_down, smallest=lambda: 1, max_trials=8, precision=0.05
        )
        found = largest_that_fits(trials).size
        shares.append(found / device.largest_from(found))
    shares.sort()
    assert len(shares) > 1000
    assert shares[0] >= 0.9
    assert shares[len(shares) // 50] >= 0.95
    assert shares[len(shares) // 2] >= 0.98
