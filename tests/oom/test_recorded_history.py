"""The verdicts are those of the same program run under the other setting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memtools.memory.allocator import replay
from lightning_memtools.oom.recorded_history import failed_request_in_words
from tests.oom.programs import MIB, carry_out


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


def test_a_trace_where_expandable_segments_help():
    run = carry_out(HELPED, 300 * MIB)
    assert run.failed_at == len(HELPED) - 1
    verdict = run.history.with_expandable_segments()
    assert verdict.served
    assert "would have been served" in verdict.why
    assert carry_out(HELPED, 300 * MIB, "expandable_segments:True").failed_at is None


def test_a_trace_where_they_do_not():
    run = carry_out(NOT_HELPED, 300 * MIB)
    assert run.failed_at == len(NOT_HELPED) - 1
    verdict = run.history.with_expandable_segments()
    assert verdict.served is False
    assert carry_out(NOT_HELPED, 300 * MIB, "expandable_segments:True").failed_at is not None


def test_a_setting_that_is_already_on_is_named_as_such():
    verdict = carry_out(NOT_HELPED, 300 * MIB, "expandable_segments:True").history.with_expandable_segments()
    assert (verdict.served, verdict.why) == (False, "expandable segments are on already")


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
    assert run.history.with_expandable_segments().served == (
        expandable.failed_at is None or expandable.failed_at > run.failed_at
    )


def test_more_memory_helps_from_where_it_is_enough():
    run = carry_out(NOT_HELPED, 300 * MIB)
    # Four segments and 100 MiB.
    assert run.history.with_more_memory(56 * MIB).served
    assert run.history.with_more_memory(54 * MIB).served is False


@pytest.mark.parametrize("max_entries", [3, 12])
def test_a_history_that_is_cut_off_gives_no_verdict(max_entries):
    run = carry_out(HELPED, 300 * MIB, max_entries=max_entries)
    failed = run.history.failed
    assert not failed.is_complete
    # What is in use is known all the same.
    assert replay(failed.trace).stats.requested == run.allocator.stats().requested
    verdict = run.history.with_expandable_segments()
    assert verdict.served is None
    assert "not reach back" in verdict.why


def test_a_history_without_a_failure_gives_none():
    history = carry_out(HELPED[:-1], 300 * MIB).history
    for verdict in (history.with_expandable_segments(), history.with_more_memory(1)):
        assert verdict.served is None
        assert "not hold the failed request" in verdict.why


def test_a_snapshot_alone_tells_what_was_requested_and_whether_expandable_segments_help():
    for program, words in ((HELPED, "would have served it"), (NOT_HELPED, "does not help: ")):
        request, verdict = failed_request_in_words(carry_out(program, 300 * MIB).history.snapshot)
        assert "100 MiB found no memory" in request
        assert f'PYTORCH_ALLOC_CONF="expandable_segments:True" {words}' in verdict
    assert failed_request_in_words(carry_out(HELPED[:-1], 300 * MIB).history.snapshot) == []
