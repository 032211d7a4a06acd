from __future__ import annotations

from lightning_memtools.memory.peaks import MemoryPoint
from lightning_memtools.memory.scalars import (
    composition_scalars,
    device_scalars,
)
from lightning_memtools.memory.sizes import GIB
from lightning_memtools.memory.stats import MemoryStats

FULL = MemoryPoint(
    MemoryStats(
        allocated=GIB,
        reserved=4 * GIB,
        inactive_split=GIB,
        alloc_retries=5,
        ooms=3,
        capacity=8 * GIB,
        device_used=6 * GIB,
    ),
    peak_allocated=2 * GIB,
    peak_reserved=4 * GIB,
    composition={"parameters": GIB // 2, "activations": GIB + GIB // 2},
)


def test_every_figure_has_its_tag_and_unit():
    assert device_scalars("val", FULL, since=MemoryStats(alloc_retries=1, ooms=3)) == {
        "memory/val/allocated_gib": 1.0,
        "memory/val/reserved_gib": 4.0,
        "memory/val/peak_allocated_gib": 2.0,
        "memory/val/peak_reserved_gib": 4.0,
        "memory/val/peak_used_pct": 50.0,
        "memory/val/fragmentation_pct": 25.0,
        "memory/capacity_gib": 8.0,
        "memory/device_used_gib": 6.0,
        "memory/alloc_retries": 4,
        "memory/ooms": 0,
    }
    assert composition_scalars(FULL) == {
        "memory/composition/parameters_gib": 0.5,
        "memory/composition/activations_gib": 1.5,
    }


def test_a_sample_is_never_shown_under_the_name_of_a_peak():
    point = MemoryPoint(MemoryStats(allocated=GIB, reserved=GIB), None, None, None)
    assert device_scalars("train", point, since=MemoryStats()) == {
        "memory/train/allocated_gib": 1.0,
        "memory/train/reserved_gib": 1.0,
    }
