"""Two real processes on the CPU: whatever goes wrong on one rank ends the run on both, at the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memtools import replay
from lightning_memtools.nonfinite.bad_step import NonFiniteCause
from tests.integration import halt_on_ranks
from tests.integration.halt_on_ranks import BAD, SCENARIOS
from tests.two_processes import seen_by_ranks

Seen = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def seen(folder) -> Seen:
    """Scenario to what ranks 0 and 1 saw."""
    by_rank = seen_by_ranks(Path(halt_on_ranks.__file__), folder, timeout_s=240)
    return {one["scenario"]: [one, other] for one, other in zip(*by_rank, strict=True)}


HALTING = [name for name in SCENARIOS if not name.startswith(("skipped", "fails"))]


@pytest.mark.parametrize("name", HALTING)
def test_both_ranks_halt_at_the_same_step_and_wait_for_no_collective(name, seen):
    zero, one = seen[name]
    assert max(zero["seconds"], one["seconds"]) < 120  # a collective that the other rank misses takes half an hour
    expected = {"validation": 7, "accumulation": 1}.get(name, BAD)
    assert zero["step"] == one["step"] == expected
    assert zero["message"] == one["message"]
    assert zero["digest"] == one["digest"]
    assert zero["global_step"] == one["global_step"] == expected + (name == "validation")  # its step was a good one
    assert zero["finite"]
    assert one["finite"]


@pytest.mark.parametrize("name", HALTING)
def test_the_culprit_rank_is_named(name, seen):
    for rank in seen[name]:
        assert rank["rank"] == 1
        assert "rank 1" in rank["message"]
        if name != "validation":
            assert rank["batch_idx"] == BAD


def test_the_cause_is_that_of_the_culprit_rank(seen):
    for name in HALTING:
        if SCENARIOS[name][0] == "sample":
            assert {rank["cause"] for rank in seen[name]} == {NonFiniteCause.DIRTY_DATA}
            assert "batch 5 holds 1 NaN in 32 elements, in sample 2" in seen[name][0]["message"]


def test_a_bad_gradient_with_good_losses_is_traced_to_its_rank_by_running_the_step_again(seen):
    """After the all-reduce it is the same everywhere; run again alone, only one rank's is bad."""
    for rank in seen["backward"]:
        assert (rank["rank"], rank["cause"]) == (1, NonFiniteCause.DOMAIN)
        assert "torch.mul in backward in Net.backward (" in rank["message"]


ALONE = [name for name in HALTING if name not in {"validation", "talks"} and not name.startswith("sharded")]


@pytest.mark.parametrize("name", ALONE)
def test_the_file_of_the_culprit_rank_replays_alone(name, seen):
    """In this process, which knows of no other rank."""
    zero, one = seen[name]
    assert zero["file"] == one["file"]
    assert zero["file"].endswith("-rank1.pt")
    assert zero["operation"] == one["operation"]
    assert zero["operation"] is not None
    found = replay(zero["file"], model=halt_on_ranks.Net)
    assert found.exact, found.mismatches
    assert found.doubts == ()
    assert len(found.losses) == (4 if name == "accumulation" else 1)


@pytest.mark.parametrize("name", ["talks", "sharded", "sharded_loss"])
def test_a_step_that_no_rank_can_run_alone_says_so_and_nobody_waits(name, seen):
    for rank in seen[name]:
        assert rank["operation"] is None
        why = "the step talks to the other ranks (allreduce)" if name == "talks" else "no rank has all weights"
        assert why in rank["message"]


def test_both_ranks_leave_the_same_step_out(seen):
    zero, one = seen["skipped"]
    assert "step" not in zero
    assert "step" not in one
    assert zero["global_step"] == one["global_step"] == 8
    assert zero["digest"] == one["digest"]


def test_a_guard_that_fails_on_one_rank_is_off_on_both_and_nobody_waits(seen):
    for rank in seen["fails_sharded"]:
        assert "step" not in rank
        assert (rank["global_step"], rank["is_off"]) == (8, True)
        assert rank["seconds"] < 60


def test_every_checkpoint_is_finite(seen, folder):
    files = [path for path in folder.rglob("*.ckpt") if path.is_file()]
    assert len(files) > 5 * len(HALTING) - 5
    for path in files:
        saved = torch.load(path, weights_only=False)
        values = [*saved["state_dict"].values()]
        assert all(torch.isfinite(value).all() for value in values), path


@pytest.mark.parametrize("name", ["sample", "sample_fused", "sharded"])
def test_the_last_good_checkpoint_is_written_once(name, seen):
    paths = {rank["checkpoint"] for rank in seen[name]}
    assert len(paths) == 1
    assert torch.load(paths.pop(), weights_only=False)["global_step"] == BAD
