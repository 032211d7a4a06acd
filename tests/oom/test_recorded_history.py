"""Recorded history: bounded, with Python stacks only; its verdicts are those of the program under other settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memtools.memory import history_recording
from lightning_memtools.memory.allocator import (
    AllocatorConfig,
    CachingAllocator,
    SimulatedOutOfMemory,
    replay,
    take_snapshot,
)
from lightning_memtools.memory.allocator import AllocatorHistory as Recorded
from lightning_memtools.memory.allocator.blocks import Block
from lightning_memtools.memory.history_recording import record
from lightning_memtools.memory.readers import CudaReader
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.recorded_history import RecordedHistory


@pytest.mark.cuda_memory
def test_a_recording_on_cuda_that_other_code_began_continues():
    torch.cuda.memory._record_memory_history(max_entries=7)
    try:
        record(CudaReader(torch.device("cuda", 0))).stop()
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_an_allocator_that_keeps_no_history_is_no_error(monkeypatch) -> None:
    def refuse() -> bool:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", refuse, raising=False)
    assert record(object.__new__(CudaReader)) is None
    assert record(None) is None


def test_on_a_simulated_device_the_last_actions_are_kept_and_what_other_code_records_continues(monkeypatch):
    monkeypatch.setattr(history_recording, "MOST_ENTRIES", 5)
    with VirtualDevice() as device:
        recorded = record(device)
        begin = recorded.now()
        for _ in range(10):
            torch.empty(1000)
        assert recorded.now() > begin
        assert len(recorded.take()["device_traces"][0]) == 5
        recorded.stop()
        recorded.stop()  # twice does no harm
        assert device.history is None
        device.record_history(7)  # by other code: it continues
        own = device.history
        record(device).stop()
        assert device.history is own


MIB = 2**20
Program = Sequence[tuple[str, int]]
"""("malloc", bytes), ("free", which of those still held, from the oldest), or ("empty", 0)."""


@dataclass
class Run:
    """What became of a program.

    Attributes:
        failed_at: The index of the request that found no memory; None if all did.
        history: What was recorded until then.
        allocator: The allocator in the end.
    """

    failed_at: int | None
    history: RecordedHistory
    allocator: CachingAllocator


def carry_out(program: Program, capacity: int, config: str = "", max_entries: int | None = None) -> Run:
    """Run a program up to the first request without memory."""
    settings = AllocatorConfig.parse(config)
    allocator = CachingAllocator(settings, capacity=capacity)
    recorded = Recorded(max_entries)
    allocator.observe(recorded)
    held: list[Block] = []
    failed_at = None
    for at, (action, number) in enumerate(program):
        if action == "malloc":
            try:
                held.append(allocator.malloc(number))
            except SimulatedOutOfMemory:
                failed_at = at
                break
        elif action == "empty":
            allocator.empty_cache()
        elif held:
            allocator.free(held.pop(number % len(held)))
    return Run(failed_at, RecordedHistory(take_snapshot(allocator, recorded), settings, capacity, 0), allocator)


def cut_segments(n: int, large: int, small: int) -> list[tuple[str, int]]:
    """n segments of `large`, of each of which a block of `small` stays in use and the rest is free."""
    program: list[tuple[str, int]] = []
    for held in range(n):
        # The whole segment is given back, and cut in two; the first part goes at the end.
        program += [("malloc", large), ("free", 2 * held)]
        program += [("malloc", large - small), ("malloc", small)]
    return program + [("free", at) for at in range(n)]


HELPED = [*cut_segments(4, 64 * MIB, 21 * MIB), ("malloc", 100 * MIB)]
"""84 MiB are in use, in four segments of 64; 100 more need a fifth, or pages of the holes."""
NOT_HELPED = [*cut_segments(4, 64 * MIB, 60 * MIB), ("malloc", 100 * MIB)]
"""240 MiB are in use: the holes are smaller than a page."""


@pytest.mark.parametrize(("program", "helps"), [(HELPED, True), (NOT_HELPED, False)])
def test_expandable_segments_help_where_the_verdict_says_so(program, helps):
    run = carry_out(program, 300 * MIB)
    assert run.failed_at == len(program) - 1
    assert run.history.with_expandable_segments()[0] is helps
    assert (carry_out(program, 300 * MIB, "expandable_segments:True").failed_at is None) is helps


ACTIONS = st.one_of(
    st.tuples(st.just("malloc"), st.integers(1, 40).map(lambda n: n * MIB)),
    st.tuples(st.just("malloc"), st.integers(1, 2 * MIB)),
    st.tuples(st.just("free"), st.integers(0, 30)),
    st.tuples(st.just("free"), st.integers(0, 30)),
    st.tuples(st.just("empty"), st.just(0)),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(ACTIONS, max_size=60), st.integers(40, 160))
def test_the_verdict_agrees_with_the_same_program_under_that_setting(program, capacity):
    program = [*program, ("malloc", capacity * MIB // 2), ("malloc", capacity * MIB // 2)]
    run = carry_out(program, capacity * MIB)
    if run.failed_at is None:
        return
    failed = run.history.failed
    assert failed.is_complete
    # Replayed as it was, the request fails in the same state.
    again = replay(failed.trace)
    assert again.completed
    assert again.stats.allocated == run.allocator.allocated
    expandable = carry_out(program, capacity * MIB, "expandable_segments:True")
    # The other run emptied its cache where the program did; this one also where memory had run short.
    assert run.history.with_expandable_segments()[0] == (
        expandable.failed_at is None or expandable.failed_at > run.failed_at
    )


@pytest.mark.parametrize("max_entries", [3, 12])
def test_a_history_that_is_cut_off_or_has_no_failure_gives_no_verdict(max_entries):
    run = carry_out(HELPED, 300 * MIB, max_entries=max_entries)
    failed = run.history.failed
    assert not failed.is_complete
    # What is in use is known all the same.
    assert replay(failed.trace).stats.requested == run.allocator.stats().requested
    served, why = run.history.with_expandable_segments()
    assert served is None
    assert "older than the recorded history" in why
    served, why = carry_out(HELPED[:-1], 300 * MIB).history.with_expandable_segments()
    assert served is None
    assert "not hold the failed request" in why
