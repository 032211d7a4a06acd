"""The tuner on two and three ranks over gloo, as a user's script starts them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import nn

from lightning_memtools.batch_size.trainer.trial_isolation import why_no_trials
from lightning_memtools.memory.sizes import MIB
from tests.two_processes import run_script

SCRIPT = Path(__file__).with_name("batch_size_ddp_run.py")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return started(
        tmp_path_factory.mktemp("two"), 2, "plain", "effective", "sync_dist", "at_epochs", "validate", "error"
    )


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return started(tmp_path_factory.mktemp("three"), 3, "plain", "own collective")


def started(root, ranks, *cases):
    """Returns what each rank wrote, by case. The ranks are started once; a case that fails ends them, so it is last."""
    run_script(SCRIPT, root, ranks, *cases)
    return {case: [json.loads((root / f"{case}{rank}.json").read_text()) for rank in range(ranks)] for case in cases}


@pytest.mark.parametrize("ranks", ["two", "three"])
def test_all_ranks_agree_on_the_size_of_the_smallest_device(ranks, request):
    found = request.getfixturevalue(ranks)["plain"]
    n_ranks = len(found)
    assert all("error" not in one for one in found), found
    first = found[0]
    assert first["limits"] == [int(128 * MIB * 0.95)] * (n_ranks - 1) + [int(48 * MIB * 0.95)]
    assert all(one["trials"] == first["trials"] for one in found)
    assert all(one["size"] == first["size"] for one in found)
    assert first["trials"][0] == [40, f"out of memory (rank {n_ranks - 1})"]
    assert 8 < first["size"] < 48 / 0.75  # 0.75 MiB per sample and rank at the least
    per_rank = -(-400 // n_ranks)
    assert all(max(one["seen"]) == min(first["size"], per_rank) for one in found)
    assert len({one["weights"] for one in found}) == 1
    assert all(one["steps"] == -(-per_rank // first["size"]) for one in found)


def test_the_buckets_of_ddp_are_held_in_trials_and_counted_once(two):
    weights, scalars = 4 * 65_536, 16 * 1024
    for one in two["plain"]:
        # Weights, gradients, two moments, and what DDP sums the gradients in.
        assert 5 * weights <= one["base"] < 5 * weights + scalars


def test_the_effective_batch_is_that_of_all_ranks(two):
    found = two["effective"]
    assert all(one["size"] * one["accumulate"] * 2 == 96 == one["effective"] for one in found)
    assert found[0]["size"] == found[1]["size"]


def test_values_logged_with_sync_dist_are_not_reduced_in_trials_and_no_rank_waits(two):
    first, second = two["sync_dist"]
    assert "error" not in first | second
    assert first["size"] == second["size"] > 8
    assert first["weights"] == second["weights"]


def test_ranks_agree_in_the_middle_of_training_and_in_validate(two):
    for case in ("at_epochs", "validate"):
        first, second = two[case]
        assert "error" not in first | second
        assert first["trials"] == second["trials"]
        assert first["size"] == second["size"] > 8
        assert first["weights"] == second["weights"]
    first, second = two["at_epochs"]
    assert first["steps"] == second["steps"] == 2 * -(-200 // first["size"])
    assert set(two["validate"][0]["seen"]) == {two["validate"][0]["size"], 200 % two["validate"][0]["size"]} - {0}


def test_own_collectives_in_the_step_are_refused_with_the_reason(three):
    for one in three["own collective"]:
        assert "collective 'allreduce' was called" in one["error"]


def test_models_that_need_the_other_ranks_in_forward_are_refused():
    ddp = SimpleNamespace(strategy=DDPStrategy(), world_size=2)
    assert why_no_trials(ddp, nn.Linear(1, 1)) is None
    assert "SyncBatchNorm exchanges" in why_no_trials(ddp, nn.Sequential(nn.SyncBatchNorm(2)))
    assert "FSDPStrategy shards" in why_no_trials(
        SimpleNamespace(strategy=FSDPStrategy(), world_size=2), nn.Linear(1, 1)
    )


def test_an_error_of_one_rank_ends_all(two):
    first, second = two["error"]
    assert "rank 1 raised an error" in first["error"]
    assert "KeyError" in second["error"]
