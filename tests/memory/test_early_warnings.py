from __future__ import annotations

import pytest

from lightning_memtools import MemoryMonitor, VirtualDevice
from lightning_memtools.memory.early_warnings import EarlyWarnings
from lightning_memtools.memory.peaks import MemoryPoint
from lightning_memtools.memory.sizes import GIB, MIB
from lightning_memtools.memory.stats import MemoryStats
from tests.callbacks.memory_models import Wide
from tests.lightning_models import loader, trainer


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
