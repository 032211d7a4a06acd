"""Snapshots have torch's form, and torch's own tools read them."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path

import pytest
from torch.cuda import _memory_viz as viz

from lightning_memtools.memory.allocator import (
    AllocatorConfig,
    CachingAllocator,
    SimulatedOutOfMemory,
    take_snapshot,
    write_snapshot,
)

MIB = 2**20


def program(config: str = "") -> CachingAllocator:
    """Blocks in use, a free one, a segment given back, and out of memory."""
    allocator = CachingAllocator(AllocatorConfig.parse(config), capacity=100 * MIB, record=True)
    allocator.malloc(600, label="model.py:48:forward\ntrain.py:7:main")
    allocator.free(allocator.malloc(5 * MIB))
    allocator.free(allocator.malloc(60 * MIB))
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(110 * MIB)
    allocator.malloc(4 * MIB, label="aten.mm")
    return allocator


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_torchs_own_tools_read_a_saved_snapshot(tmp_path: Path, config: str) -> None:
    path = tmp_path / "snapshot.pickle"
    write_snapshot(take_snapshot(program(config)), path)
    with path.open("rb") as file:
        snapshot = pickle.load(file)  # noqa: S301, written two lines above
    summary = viz.segsum(snapshot)  # raises where sizes do not add up
    assert "segments: 2\n" in summary
    assert "total_reserved: 22.0MiB" in summary
    assert "total_allocated: 4.0MiB" in summary
    history = viz.trace(snapshot)
    assert "raise OutOfMemoryError # 110.0MiB requested, 98.0MiB free in CUDA" in history
    assert f"{len(snapshot['device_traces'][0])} entries" in history
    flames = viz.memory(snapshot, format_flamegraph=str)
    assert "stream_0;active_allocated;train.py:7:main;model.py:48:forward 600" in flames
    assert f"stream_0;active_allocated;:0:aten.mm {4 * MIB}" in flames
    assert "seg_" in viz.segments(snapshot, format_flamegraph=str)
    assert "Active Memory Timeline" in viz.trace_plot(snapshot)
    assert "Allocator State History" in viz.segment_plot(snapshot)


def test_the_snapshots_pickle_holds_only_types_that_the_viewer_reads(tmp_path: Path) -> None:
    # torch/utils/viz/MemoryViz.js reads pickles with a reader of its own, which knows these and up to protocol 4.
    known = {
        *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT"),
        *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK"),
        *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP"),
        *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    }
    path = tmp_path / "snapshot.pickle"
    write_snapshot(take_snapshot(program()), path)
    opcodes = list(pickletools.genops(path.read_bytes()))
    assert {opcode.name for opcode, _, _ in opcodes} <= known
    assert opcodes[0][1] == 4
