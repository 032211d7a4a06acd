"""Rule 2 (rounding), 3 (pool limit) and 4 (segments): every figure by hand."""

from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig
from lightning_memtools.memory.allocator.block_rounding import block_size, round_to_power_of_two_division, segment_size

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("asked", "size"),
    [(1, 512), (4, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (1025, 1536), (MIB + 1, MIB + 512)],
)
def test_sizes_are_rounded_up_to_multiples_of_512(asked: int, size: int) -> None:
    assert block_size(asked) == size


def test_the_example_of_the_documentation_with_four_divisions() -> None:
    # 1200 lies between 1024 and 2048, whose four divisions end at 1280, 1536, 1792 and 2048.
    assert round_to_power_of_two_division(1200, 4) == 1280
    assert [round_to_power_of_two_division(n, 4) for n in (1281, 1536, 1537, 1793)] == [1536, 1536, 1792, 2048]


def test_a_power_of_two_stays_with_divisions() -> None:
    assert block_size(4 * KIB, (4,) * 16) == 4 * KIB


def test_divisions_apply_only_above_512_times_their_number() -> None:
    # 2048 is 512 * 4, so up to it multiples of 512; just above, quarters of 2048: 2560.
    assert block_size(2047, (4,) * 16) == 2048
    assert block_size(1500, (4,) * 16) == 1536
    assert block_size(2049, (4,) * 16) == 2560
    assert block_size(5000, (4,) * 16) == 5120


def test_one_division_means_none() -> None:
    assert block_size(5000, (1,) * 16) == 5120
    assert block_size(100_000, (1,) * 16) == 100_352  # 196 * 512
    assert block_size(100_000, (2,) * 16) == 131_072  # 65536 + 32768 is less


def test_each_interval_of_sizes_has_its_own_divisions() -> None:
    # Up to 2 MiB eighths, from 2 to 4 MiB halves, from 4 MiB on none.
    divisions = AllocatorConfig.parse("roundup_power2_divisions:[1:8,2:2,>:1]").roundup_power2_divisions
    assert block_size(MIB + 1, divisions) == MIB + 128 * KIB
    assert block_size(2 * MIB - 1, divisions) == 2 * MIB
    assert block_size(2 * MIB + 1, divisions) == 3 * MIB
    assert block_size(4 * MIB + 1, divisions) == 4 * MIB + 512


def test_the_last_interval_takes_all_larger_sizes() -> None:
    divisions = (0,) * 15 + (2,)
    assert block_size(32 * GIB + 1, divisions) == 48 * GIB
    assert block_size(100 * GIB, divisions) == 128 * GIB
    assert block_size(16 * GIB + 1, divisions) == 16 * GIB + 512


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_segments(size: int, segment: int) -> None:
    assert segment_size(size) == segment


def test_a_large_segment_size_setting_applies_to_requests_below_10_mib() -> None:
    assert segment_size(5 * MIB, large_segment=64 * MIB) == 64 * MIB
    assert segment_size(11 * MIB, large_segment=64 * MIB) == 12 * MIB
    assert segment_size(512, large_segment=64 * MIB) == 2 * MIB
