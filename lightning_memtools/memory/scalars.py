"""Memory figures as named scalars: the tags of the logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning_memtools.memory.peaks import MemoryPoint, Phase, Stage
from lightning_memtools.memory.sizes import to_gib
from lightning_memtools.memory.stats import MemoryStats


def _gib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else to_gib(n_bytes)


def _peak_used_pct(point: MemoryPoint, _: MemoryStats) -> float | None:
    if point.peak_reserved is None or not point.stats.capacity:
        return None
    return 100 * point.peak_reserved / point.stats.capacity


def _fragmentation_pct(point: MemoryPoint, _: MemoryStats) -> float | None:
    if point.stats.inactive_split is None or point.stats.reserved is None:
        return None
    return 100 * point.stats.inactive_split / max(point.stats.reserved, 1)


def count_since(count: int | None, before: int | None) -> int | None:
    """Return how far an event count has risen above the earlier count `before`; None if events are not counted."""
    return None if count is None else count - (before or 0)


# Each takes the point and the device's statistics at the beginning of the run, and gives None for what is not known.
_DEVICE_FIGURES: Mapping[str, Callable[[MemoryPoint, MemoryStats], float | None]] = {
    "memory/{stage}/allocated_gib": lambda point, _: _gib(point.stats.allocated),
    "memory/{stage}/reserved_gib": lambda point, _: _gib(point.stats.reserved),
    "memory/{stage}/peak_allocated_gib": lambda point, _: _gib(point.peak_allocated),
    "memory/{stage}/peak_reserved_gib": lambda point, _: _gib(point.peak_reserved),
    "memory/{stage}/peak_used_pct": _peak_used_pct,
    "memory/{stage}/fragmentation_pct": _fragmentation_pct,
    "memory/capacity_gib": lambda point, _: _gib(point.stats.capacity),
    "memory/device_used_gib": lambda point, _: _gib(point.stats.device_used),
    "memory/alloc_retries": lambda point, since: count_since(point.stats.alloc_retries, since.alloc_retries),
    "memory/ooms": lambda point, since: count_since(point.stats.ooms, since.ooms),
}


def device_scalars(stage: Stage, point: MemoryPoint, *, since: MemoryStats) -> dict[str, float]:
    """Return a device's memory as a dict from log tags to values, without values that the device does not report.

    Args:
        stage: The stage, such as "train", in which the memory was read.
        point: The memory at one moment of the stage.
        since: The device's statistics when the run began; retries and out-of-memory errors are counted from there.
    """
    values = {tag.format(stage=stage): figure(point, since) for tag, figure in _DEVICE_FIGURES.items()}
    return {tag: value for tag, value in values.items() if value is not None}


def composition_scalars(point: MemoryPoint) -> dict[str, float]:
    """Return the GiB of each category, such as parameters, at the peak, as a dict by log tag; empty if not known."""
    return {f"memory/composition/{part}_gib": to_gib(size) for part, size in (point.composition or {}).items()}


def phase_scalars(peaks: Mapping[Phase, int]) -> dict[str, float]:
    """Return the peak memory of the phases (forward, backward and optimizer) in GiB, by log tag."""
    return {f"memory/train/peak_{phase}_gib": to_gib(n_bytes) for phase, n_bytes in peaks.items()}


def over_ranks(by_rank: Sequence[Mapping[str, float]], stage: Stage) -> dict[str, float]:
    """Return each tag's maximum over all ranks; for peak memory, also the minimum and the rank with the maximum.

    Args:
        by_rank: One mapping per rank, from log tags to values; a rank may lack some tags.
        stage: The stage, such as "train", in which the values were read.
    """
    merged: dict[str, float] = {}
    for scalars in by_rank:
        merged |= {tag: max(value, merged.get(tag, value)) for tag, value in scalars.items()}
    peak = f"memory/{stage}/peak_allocated_gib"
    peaks = {rank: scalars[peak] for rank, scalars in enumerate(by_rank) if peak in scalars}
    if len(by_rank) > 1 and peaks:
        merged[f"{peak}_min"] = min(peaks.values())
        merged[f"memory/{stage}/peak_rank"] = max(peaks, key=lambda rank: peaks[rank])
    return merged
