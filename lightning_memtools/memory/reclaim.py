"""Giving cached memory back: how much could go, whether it is worth it, and what went."""

from __future__ import annotations

from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.memory.stats import MemoryReader, MemoryStats


class WorthReclaiming:
    """Decides whether emptying the cache pays: what was given back must be asked for again by whoever comes next.

    Args:
        minimum: A share in (0, 1] of the device's capacity (of what is reserved, where the capacity is not known), or
            a size such as ``"512MiB"``.

    Raises:
        ValueError: It is neither.
    """

    def __init__(self, minimum: float | str) -> None:
        self._share = self._bytes = None
        if isinstance(minimum, str):
            self._bytes = _checked_size(minimum)
        elif not isinstance(minimum, (int, float)) or isinstance(minimum, bool) or not 0 < minimum <= 1:
            raise _not_a_minimum(minimum)
        else:
            self._share = minimum

    def minimum_bytes(self, stats: MemoryStats) -> float:
        """The least that is worth giving back, on this device now."""
        if self._bytes is not None:
            return self._bytes
        assert self._share is not None
        return self._share * (stats.capacity or stats.reserved or 0)

    def __call__(self, stats: MemoryStats) -> bool:
        """Whether what could be given back reaches the minimum."""
        n_bytes = reclaimable_bytes(stats)
        return n_bytes > 0 and n_bytes >= self.minimum_bytes(stats)


def reclaimable_bytes(stats: MemoryStats) -> int:
    """What empty_cache could give back: whole free segments.

    Reserved memory is in use (active), or free beside used blocks of the same segment (inactive split, which stays), or
    free as whole segments. The last is the difference, from three counters that the allocator keeps anyway; walking
    `memory_snapshot` would cost milliseconds for the same figure. Two things make it an upper bound: segments of
    private pools (CUDA graphs) stay while their graph lives, and expandable segments go back by whole pages only.
    Where a device does not count splits (MPS), it is an upper bound too.
    """
    if stats.reserved is None:
        return 0
    used = stats.active if stats.active is not None else stats.allocated
    return max(0, stats.reserved - (used or 0) - (stats.inactive_split or 0))


def reclaim(reader: MemoryReader) -> int:
    """Empty the cache and return how many bytes went back. Waits for the device, as freeing its memory always does."""
    before = reader.stats().reserved or 0
    reader.empty_cache()
    return max(0, before - (reader.stats().reserved or 0))


def _checked_size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise _not_a_minimum(text) from error


def _not_a_minimum(minimum: object) -> ValueError:
    return ValueError(
        f"min_reclaimable={minimum!r} is neither a share nor a size. Give a share of the device as a number above 0 "
        'and up to 1 (0.05 is 5%), or a size with a unit, such as "512MiB" or "2GB".'
    )
