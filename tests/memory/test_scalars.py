"""Memory figures: over ranks, as scalars, early warnings, values that arrive late."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools import MemoryMonitor, VirtualDevice
from lightning_memtools.memory.arriving_values import ArrivingValues
from lightning_memtools.memory.early_warnings import EarlyWarnings
from lightning_memtools.memory.peaks import MemoryPoint
from lightning_memtools.memory.scalars import composition_scalars, device_scalars
from lightning_memtools.memory.sizes import GIB, MIB
from lightning_memtools.memory.stats import MemoryStats
from tests.callbacks.memory_models import Wide
from tests.lightning_models import loader, trainer

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


def test_values_that_were_dropped_do_not_arrive():
    arriving = ArrivingValues[None]()
    arriving.send(torch.tensor([1.0]), None)
    arriving.clear()
    assert list(arriving.receive(wait=True)) == []


def point(*, retries=0, peak=0, pieces=0) -> MemoryPoint:
    stats = MemoryStats(alloc_retries=retries, capacity=10 * GIB, inactive_split=pieces)
    return MemoryPoint(stats, peak, peak, None)


def test_each_warning_is_said_once():
    early = EarlyWarnings(retries=2)
    assert early.look(point(retries=2, peak=9 * GIB)) == []
    (said,) = early.look(point(retries=5))
    assert said.startswith("Allocation retries have begun (3)")
    (said,) = early.look(point(retries=6, peak=int(9.6 * GIB)))
    assert "96.0% of the device's 10.0 GiB" in said
    assert early.look(point(retries=9, peak=10 * GIB)) == []


def test_fragmentation_has_to_grow_and_to_matter():
    def said(*sizes):
        early = EarlyWarnings()
        return [text for size in sizes for text in early.look(point(pieces=size))]

    assert said(GIB, 2 * GIB, GIB, 2 * GIB, GIB, 2 * GIB) == []
    assert said(*(size * MIB for size in (1, 2, 3, 4, 5))) == []
    (text,) = said(GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB)
    assert "1.00 GiB of reserved memory lay free in pieces 3 points ago, 4.00 GiB do now" in text


def test_a_run_on_a_nearly_full_device_is_told_once(tmp_path):
    with VirtualDevice("128MiB"), pytest.warns(UserWarning, match="of the device's 128 MiB") as caught:
        trainer(tmp_path, MemoryMonitor()).fit(Wide({"train": [122, 122, 122]}), loader())
    assert len([one for one in caught if "Peak reserved" in str(one.message)]) == 1
