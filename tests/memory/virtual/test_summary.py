"""The table is the one that torch.cuda.memory_summary prints."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.cuda_texts import summary_table


def test_rows_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with VirtualDevice("1GiB") as device:
        kept = [torch.ones(2**n) for n in range(22)]
        del kept[::3]
        stats = device._allocator.memory_stats()
        ours = device.summary()
        del kept
    # torch's own function over our figures; only where they come from is replaced.
    others = {f"{name}.{kind}": 0 for name in ("oversize_allocations", "oversize_segments") for kind in KINDS}
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", lambda device: {**stats, **others})
    theirs = torch.cuda.memory_summary(0)
    rows = [line for line in ours.splitlines() if "|" in line.strip("|")]
    assert len(rows) == 29
    for row in rows[1:]:
        assert row in theirs.splitlines()


KINDS = ("current", "peak", "allocated", "freed")


def test_heading_says_simulated() -> None:
    with VirtualDevice("24GiB") as device:
        lines = device.summary().splitlines()
    assert "PyTorch CUDA memory summary, virtual device (24GiB, simulated)" in lines[1]
    assert len({len(line) for line in lines}) == 1


def test_counts_change_unit_where_torch_changes_it() -> None:
    names = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes")
    counts = ("allocation", "active", "segment", "inactive_split")
    pools = ("all", "large_pool", "small_pool")
    stats = {f"{name}.{pool}.{kind}": 0 for name in (*names, *counts) for pool in pools for kind in KINDS}
    stats |= {"num_ooms": 3, "num_alloc_retries": 4}
    stats["allocation.all.current"] = 749_999
    stats["allocation.all.peak"] = 750_000
    stats["allocated_bytes.all.current"] = 768 * 1024 - 1
    stats["allocated_bytes.all.peak"] = 768 * 1024
    table = summary_table(stats, title="x")
    assert "| Allocations           |  749999    |     750 K  |       0    |       0    |" in table
    assert "| Allocated memory      | 786431 B   |    768 KiB |      0 B   |      0 B   |" in table
    assert "CUDA OOMs: 3 " in table
    assert "cudaMalloc retries: 4 " in table
