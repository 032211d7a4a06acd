"""The table is the one that torch.cuda.memory_summary prints."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.memory.virtual import VirtualDevice


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
