"""The callbacks on two ranks of DDP and FSDP 2, in one pair of processes."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from lightning_memtools.memory.sizes import MIB
from lightning_memtools.tensorboard_plugin.snapshot_timeline import timeline_from
from tests.callbacks.spike_models import AT, N_BATCHES
from tests.event_files import scalars
from tests.integration import two_ranks
from tests.integration.two_ranks import ACTIONS, PARTS, SIZES
from tests.lightning_models import assert_same_bits
from tests.two_processes import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("two_ranks")
    ranks = run_ranks(Path(two_ranks.__file__), root, timeout_s=500)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stdout + rank.stderr for rank in ranks)
    assert {path.name for path in root.iterdir()} == set(PARTS)
    return root


def left(folder, name):
    """What both ranks left."""
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(params=["monitor", "monitor_sharded"])
def root(request, folder):
    return folder / request.param


def test_rank_zero_alone_writes(root):
    writers = {path.name.split(".")[-2] for path in root.rglob("*.tfevents.*")}  # the process id is in the name
    assert len(writers) == 1
    assert len([*root.rglob("metrics.csv")]) == 1
    reports = [path.name for path in root.rglob("memtools/*") if path.suffix != ".pickle"]  # each rank has its snapshot
    assert sorted(reports) == ["memory_summary_fit.md", "memory_summary_test.md"]
    assert (root / "stdout0").read_text().count("highest of 2 ranks") == 2  # one block for fit, one for test
    assert (root / "stdout1").read_text().count("highest of 2 ranks") == 0


def test_memory_is_the_maximum_and_says_which_rank_holds_it(root):
    curves = scalars(root / "board")
    peak = "memory/train/peak_allocated_gib"
    points = [*zip(*(curves[name] for name in (peak, f"{peak}_min", "memory/train/peak_rank")), strict=True)]
    assert len(points) == 3
    for whole, least, rank in points:
        assert whole[1] > 40 / 1024 > least[1]
        assert rank[1] == 1
    assert [rank for _, rank in curves["memory/test/peak_rank"]] == [0]
    (path,) = root.rglob("memory_summary_fit.md")
    (row,) = [line for line in path.read_text().splitlines() if line.startswith("| train")]
    assert float(row.split("|")[2].split()[0]) >= 40


def test_losses_are_means_over_both_ranks_in_every_logger(root):
    ranks = left(root, "losses")
    assert ranks[0] != ranks[1]
    curves = scalars(root / "board")
    both = [(a + b) / 2 for a, b in zip(ranks[0]["train"], ranks[1]["train"], strict=True)]
    assert curves["loss/train"] == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in enumerate(both)]
    val = [loss for rank in ranks for loss in rank["val"]]
    assert curves["loss/val"] == [(2, pytest.approx(sum(val) / len(val), rel=1e-5))]
    (file,) = root.rglob("metrics.csv")
    rows = [*csv.DictReader(file.read_text().splitlines())]
    table = [(int(row["step"]), float(row["loss/train"])) for row in rows if row.get("loss/train")]
    assert table == [(step, pytest.approx(value, rel=1e-5)) for step, value in curves["loss/train"]]


def test_each_rank_writes_a_snapshot_of_its_own_step(root):
    peaks = []
    for rank in (0, 1):
        view = timeline_from(root / "board" / "memtools" / f"memory_snapshot_step2_rank{rank}.pickle")
        assert (view["title"], view["rank"]) == ("step 2", rank)
        peaks.append(view["peak"]["bytes"])
    assert peaks[0] < 40 * MIB <= peaks[1]  # a step of rank 1 takes 40 MiB, one of rank 0 takes 1 MiB


# --- EmptyCache: each rank decides for itself, and none waits for the other


def test_each_rank_gives_back_what_is_worth_it_there(folder):
    zero, one = left(folder / "cache", "cache")
    # One validation batch per epoch and rank. Rank 0 keeps its 10 MiB of training: not worth it. Rank 1 gives 100 back.
    small = one["reserved_mib"][0]
    assert zero["reserved_mib"] == [small + 10] * 3
    assert one["reserved_mib"] == [small] * 3
    assert small < 10


def test_only_the_rank_that_leaks_warns_and_says_which_it_is(folder):
    zero, one = left(folder / "cache", "cache")
    assert zero["warnings"] == []
    (text,) = one["warnings"]
    assert "of rank 1" in text
    assert "Leaking.outputs (a list of 3;" in text


# --- BatchSizeTuner


@pytest.fixture(scope="module")
def sizes(folder):
    return {case: left(folder / "sizes", case) for case in SIZES}


def test_both_ranks_agree_on_the_size_of_the_smaller_device(sizes):
    first, second = sizes["plain"]
    assert first["limit"] == 48 * MIB  # a margin of 5% is less than a segment
    assert first["trials"] == second["trials"]
    assert first["trials"][0] == [40, "out of memory (rank 1)"]
    assert 8 < first["size"] < 48 / 0.75  # 0.75 MiB per sample and rank at the least
    assert first["weights"] == second["weights"]
    for one in (first, second):
        assert max(one["seen"]) == one["size"] == first["size"]
        assert one["steps"] == -(-200 // one["size"])


def test_the_buckets_of_ddp_are_held_in_trials_and_counted_once(sizes):
    weights, scalars = 4 * 65_536, 16 * 1024
    for one in sizes["plain"]:
        # Weights, gradients, two moments, and what DDP sums the gradients in.
        assert 5 * weights <= one["base"] < 5 * weights + scalars


def test_the_effective_batch_is_that_of_all_ranks(sizes):
    assert all(one["size"] * one["accumulate"] * 2 == 96 == one["effective"] for one in sizes["effective"])


def test_ranks_agree_where_values_are_reduced(sizes):
    first, second = sizes["sync_dist"]
    assert "error" not in first | second
    assert first["trials"] == second["trials"]
    assert first["size"] == second["size"] > 8
    assert first["weights"] == second["weights"]


def test_what_needs_the_other_ranks_in_a_step_is_refused_with_the_reason(sizes):
    for one in sizes["own collective"]:
        assert "collective 'allreduce' was called" in one["error"]


def test_an_error_of_one_rank_in_a_search_ends_both(folder):
    first, second = left(folder / "error", "error")
    assert "rank 1 raised an error" in first["error"]
    assert "batch 7 of rank 1 is bad" in first["error"]
    assert second["error"] == "BadBatchError: batch 7 of rank 1 is bad"


# --- GradientCheckpointing


def plans(folder, case):
    return {
        (name, rank): torch.load(folder / "plans" / f"{case}-{name}{rank}.pt", weights_only=False)
        for name in ("plain", "planned")
        for rank in (0, 1)
    }


def test_an_error_of_the_users_own_class_in_planning_leaves_both_ranks_without_a_plan(folder):
    found = plans(folder, "untraceable")
    assert [found["planned", rank]["plan"] for rank in (0, 1)] == [None, None]
    for rank in (0, 1):
        assert_same_bits(found["plain", rank]["weights"], found["planned", rank]["weights"])


@pytest.mark.parametrize("case", ["ddp", "fsdp2"])
def test_both_ranks_recompute_the_same_and_end_in_the_same_bits(case, folder):
    """Under FSDP 2, nothing is gathered more often than without a plan."""
    found = plans(folder, case)
    plan = found["planned", 0]["plan"]
    assert plan == found["planned", 1]["plan"]
    assert any(chain.ranges for chain in plan)
    for rank in (0, 1):
        plain, planned = found["plain", rank], found["planned", rank]
        assert planned["gathered"] == plain["gathered"]
        assert case != "fsdp2" or plain["gathered"] > 0
        assert_same_bits(plain["weights"], planned["weights"])


# --- TrainingDoctor


def test_a_mistake_on_one_rank_ends_training_on_both_at_the_same_step(folder):
    first, second = left(folder / "doctor", "doctor")
    assert first["said"] == second["said"]
    assert "retained_graphs (error), KeepsOnOneRank.total" in first["said"]
    assert first["steps"] == second["steps"] == 8


# --- LossSpikes


@pytest.mark.parametrize("action", ACTIONS)
def test_both_ranks_find_the_same_spike_and_end_with_the_same_weights(action, folder):
    zero, one = left(folder / "spikes", action)
    assert zero == one
    ((step, done, loss, norm, taken_back),) = zero["spikes"]
    assert (step, done) == (AT, action)
    assert loss > 1000  # of the rank with the bad batch
    assert math.isfinite(norm)
    assert bool(zero["error"]) == (action == "halt")
    steps = {"rollback": N_BATCHES - 1 - taken_back, "halt": AT}
    assert zero["global_step"] == steps.get(action, N_BATCHES)


# --- all of them


def test_all_callbacks_at_once_change_no_bit_of_the_weights(folder):
    names = left(folder / "every_callback", "names")[0]
    assert len(names) >= 8
    for rank in (0, 1):
        with_all, without = (torch.load(folder / "every_callback" / f"{name}{rank}.pt") for name in ("with", "without"))
        assert_same_bits(without, with_all)
