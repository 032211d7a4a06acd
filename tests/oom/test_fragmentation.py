"""Settings against fragmentation: what is said of each is what becomes of the same program under it."""

from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig
from lightning_memtools.oom.fragmentation import (
    SETTINGS,
    changed,
    fragmentation_in_words,
    history_of,
    pinned_segments,
    settings_that_serve,
    with_setting,
)
from tests.oom.programs import MIB, Program, carry_out

# Three segments of 18 MiB, each held by a block of 9.5 MiB; then 16 MiB are wanted where 14 are left.
PINNED: Program = [
    *[("malloc", 18 * MIB), ("free", -1), ("malloc", 19 * MIB // 2)] * 3,
    ("malloc", 16 * MIB),
]
CAPACITY = 68 * MIB
# Nothing is free in pieces: more is wanted than there is.
FULL: Program = [("malloc", 30 * MIB), ("malloc", 30 * MIB), ("malloc", 16 * MIB)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("program", [PINNED, FULL], ids=["pinned", "full"])
def test_a_setting_serves_the_request_if_it_serves_the_program(program, setting):
    failed = carry_out(program, CAPACITY)
    assert failed.failed_at == len(program) - 1
    really = carry_out(program, CAPACITY, config=setting)
    assert with_setting(failed.history, setting).served is (really.failed_at is None)


def test_for_pieces_there_is_a_way_out_and_for_a_full_device_there_is_none():
    def serving(program: Program) -> list[str]:
        history = carry_out(program, CAPACITY).history
        return [setting for setting, verdict in settings_that_serve(history, lambda: None) if verdict.served]

    assert "expandable_segments:True" in serving(PINNED)
    assert serving(FULL) == []


def test_a_setting_changes_nothing_but_itself():
    config = AllocatorConfig.parse("max_split_size_mb:200,expandable_segments:True")
    new = changed(config, "roundup_power2_divisions:4")
    assert (new.max_split_size, new.expandable_segments) == (config.max_split_size, True)
    assert new.roundup_power2_divisions != config.roundup_power2_divisions


def test_segments_that_are_held_half_empty_are_named():
    pins = pinned_segments(carry_out(PINNED, CAPACITY).history.snapshot)
    assert [(one.n_bytes, one.free_bytes) for one in pins] == [(18 * MIB, 17 * MIB // 2)] * 3
    assert pinned_segments(carry_out(FULL, CAPACITY).history.snapshot) == []


def test_a_snapshot_alone_tells_the_limit_and_what_helps():
    run = carry_out(PINNED, CAPACITY)
    history = history_of(run.history.snapshot)
    assert history.capacity == CAPACITY
    lines = fragmentation_in_words(run.history.snapshot)
    assert "16.0 MiB found no memory" in lines[0]
    assert any('"expandable_segments:True": it would' in line for line in lines)
    assert any('"max_split_size_mb:1024": does not help' in line for line in lines)
    assert fragmentation_in_words(carry_out(PINNED[:-1], CAPACITY).history.snapshot) == []
