"""Rounding to divisions of powers of two, for sizes that fit no small device too: every figure by hand."""

from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig
from lightning_memtools.memory.allocator.block_rounding import block_size

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("divisions", "sizes"),
    [
        # A power of two stays. 2048 is 512 * 4: up to it multiples of 512; just above, quarters of 2048: 2560.
        ((4,) * 16, {4 * KIB: 4 * KIB, 2047: 2048, 1500: 1536, 2049: 2560, 5000: 5120}),
        ((1,) * 16, {5000: 5120, 100_000: 100_352}),  # none; 196 * 512
        ((2,) * 16, {100_000: 131_072}),  # 65536 + 32768 is less
        ((0,) * 15 + (2,), {32 * GIB + 1: 48 * GIB, 100 * GIB: 128 * GIB, 16 * GIB + 1: 16 * GIB + 512}),
        # Up to 2 MiB eighths, from 2 to 4 MiB halves, from 4 MiB on none.
        (
            AllocatorConfig.parse("roundup_power2_divisions:[1:8,2:2,>:1]").roundup_power2_divisions,
            {
                MIB + 1: MIB + 128 * KIB, 2 * MIB - 1: 2 * MIB, 2 * MIB + 1: 3 * MIB, 4 * MIB + 1: 4 * MIB + 512,
            },
        ),
    ],
)  # fmt: skip
def test_sizes_are_rounded_up_to_the_divisions_of_their_interval(divisions, sizes):
    assert {asked: block_size(asked, divisions) for asked in sizes} == sizes
