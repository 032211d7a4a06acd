"""A reading of memory as named scalars: the tags of the logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_memtools.memory.sizes import to_gib
from lightning_memtools.memory.stages import PHASES, MemoryPoint, Phase, Stage
from lightning_memtools.memory.stats import MemoryStats

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")


def device_scalars(stage: Stage, point: MemoryPoint, *, since: MemoryStats) -> dict[str, float]:
    """What is logged of a device at a point of a stage; what the device cannot tell is left out.

    Args:
        stage: The stage whose point it is.
        point: What was read.
        since: The device when the run began; retries and out-of-memory errors are counted from there.
    """
    stats = point.stats
    sizes = {
        f"memory/{stage}/allocated_gib": stats.allocated,
        f"memory/{stage}/reserved_gib": stats.reserved,
        f"memory/{stage}/peak_allocated_gib": point.peak_allocated,
        f"memory/{stage}/peak_reserved_gib": point.peak_reserved,
        "memory/capacity_gib": stats.capacity,
        "memory/device_used_gib": stats.device_used,
    }
    scalars = {tag: to_gib(n_bytes) for tag, n_bytes in sizes.items() if n_bytes is not None}
    if point.peak_reserved is not None and stats.capacity:
        scalars[f"memory/{stage}/peak_used_pct"] = 100 * point.peak_reserved / stats.capacity
    if stats.inactive_split is not None and stats.reserved is not None:
        scalars[f"memory/{stage}/fragmentation_pct"] = 100 * stats.inactive_split / max(stats.reserved, 1)
    if stats.alloc_retries is not None:
        scalars["memory/alloc_retries"] = stats.alloc_retries - (since.alloc_retries or 0)
    if stats.ooms is not None:
        scalars["memory/ooms"] = stats.ooms - (since.ooms or 0)
    return scalars


def composition_scalars(point: MemoryPoint) -> dict[str, float]:
    """What allocated memory consisted of when it was highest, in GiB; nothing where it is not known."""
    return {f"memory/composition/{part}_gib": to_gib(size) for part, size in (point.composition or {}).items()}


def batch_scalars(stage: Stage, point: MemoryPoint) -> dict[str, float]:
    """What is logged of a device at the end of an evaluation batch."""
    sizes = {
        "allocated": point.stats.allocated,
        "reserved": point.stats.reserved,
        "peak_allocated": point.peak_allocated,
        "peak_reserved": point.peak_reserved,
    }
    return {f"memory/{stage}/batch_{name}_gib": to_gib(size) for name, size in sizes.items() if size is not None}


def phase_scalars(peaks: Mapping[Phase, int]) -> dict[str, float]:
    """The peaks of forward, backward and optimizer in GiB."""
    return {f"memory/train/peak_{phase}_gib": to_gib(n_bytes) for phase, n_bytes in peaks.items()}


def possible_tags(stage: Stage) -> list[str]:
    """Every tag that a point of this stage may have, in an order that is the same on all ranks."""
    of_stage = ("allocated_gib", "reserved_gib", "peak_allocated_gib", "peak_reserved_gib", "peak_used_pct",
                "fragmentation_pct")  # fmt: skip
    of_device = ("capacity_gib", "device_used_gib", "alloc_retries", "ooms", "host_rss_gib")
    return [
        *(f"memory/{stage}/{figure}" for figure in of_stage),
        *(f"memory/{figure}" for figure in of_device),
        *(f"memory/composition/{category}_gib" for category in CATEGORIES),
        *(f"memory/train/peak_{phase}_gib" for phase in PHASES),
        "time/step_ms",
    ]


def over_ranks(by_rank: Sequence[Mapping[str, float]], stage: Stage, *, per_rank: bool) -> dict[str, float]:
    """Several ranks' scalars as one: the maximum of each, the smallest peak, and which rank holds the largest.

    Args:
        by_rank: One mapping per rank; a tag that a rank cannot tell is absent there.
        stage: The stage whose point it is.
        per_rank: Add every rank's own value as `<tag>/rank<r>`.
    """
    merged: dict[str, float] = {}
    for tag in possible_tags(stage):
        values = {rank: scalars[tag] for rank, scalars in enumerate(by_rank) if tag in scalars}
        if values:
            merged[tag] = max(values.values())
            if per_rank:
                merged.update({f"{tag}/rank{rank}": value for rank, value in values.items()})
    peak = f"memory/{stage}/peak_allocated_gib"
    peaks = {rank: scalars[peak] for rank, scalars in enumerate(by_rank) if peak in scalars}
    if len(by_rank) > 1 and peaks:
        merged[f"{peak}_min"] = min(peaks.values())
        merged[f"memory/{stage}/peak_rank"] = max(peaks, key=lambda rank: peaks[rank])
    return merged
