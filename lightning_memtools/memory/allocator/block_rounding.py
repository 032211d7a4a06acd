"""The rounding of PyTorch's CUDA caching allocator: from requested bytes to a block, and from a block to a segment.

Constants are those of c10/core/AllocatorConfig.h in torch 2.13.
"""

from __future__ import annotations

from lightning_memtools.memory.sizes import MIB

MIN_BLOCK = 512
"""Every block's size is a multiple of this many bytes."""
SMALL_LIMIT = 1 * MIB
"""The largest request served from the small pool."""
SMALL_SEGMENT = 2 * MIB
"""The size of the segments that the small pool requests from the device."""
LARGE_SEGMENT = 20 * MIB
"""The size of the segments that the large pool requests for allocations below `WHOLE_SEGMENT_FROM`."""
WHOLE_SEGMENT_FROM = 10 * MIB
"""Requests of at least this size get a segment of their own."""
SEGMENT_STEP = 2 * MIB
"""Segments of their own are rounded up to a multiple of this."""

# One entry per power-of-two interval: below 2 MiB, 2 to 4 MiB, ... , 32 GiB and above.
ROUNDUP_INTERVALS = 16


def round_up(n_bytes: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``n_bytes``."""
    return -(-n_bytes // step) * step


def round_to_power_of_two_division(n_bytes: int, divisions: int) -> int:
    """Round up to one of ``divisions`` equal steps between two powers of two; return a power of two unchanged.

    For 1200 bytes and 4 divisions, the range from 1024 to 2048 is cut at 1280, 1536 and 1792, so the result is 1280.
    """
    power = 1 << (n_bytes.bit_length() - 1)
    if n_bytes == power:
        return n_bytes
    # At least 1: more divisions than bytes would otherwise divide by zero.
    return round_up(n_bytes, max(power // divisions, 1))


def roundup_divisions_of(n_bytes: int, divisions_per_interval: tuple[int, ...]) -> int:
    """Look up the number of divisions for a size: the first entry is for sizes below 2 MiB, the last from 32 GiB up."""
    interval = n_bytes.bit_length() - MIB.bit_length()
    return divisions_per_interval[min(max(interval, 0), ROUNDUP_INTERVALS - 1)]


def block_size(n_bytes: int, divisions_per_interval: tuple[int, ...] = ()) -> int:
    """Return the size of the block that serves a request of ``n_bytes``, in bytes.

    Args:
        n_bytes: The requested size, at least 1.
        divisions_per_interval: The setting ``roundup_power2_divisions``; if empty, sizes are rounded up to 512 bytes.
    """
    if n_bytes < MIN_BLOCK:
        return MIN_BLOCK
    if divisions_per_interval:
        divisions = roundup_divisions_of(n_bytes, divisions_per_interval)
        if divisions > 1 and n_bytes > MIN_BLOCK * divisions:
            return round_to_power_of_two_division(n_bytes, divisions)
    return round_up(n_bytes, MIN_BLOCK)


def segment_size(size: int, large_segment: int = LARGE_SEGMENT) -> int:
    """Return the size of the segment to request for ``size`` bytes: ``large_segment`` if between 1 and 10 MiB."""
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if size < WHOLE_SEGMENT_FROM:
        return large_segment
    return round_up(size, SEGMENT_STEP)
