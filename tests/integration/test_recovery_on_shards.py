"""Two real processes on the CPU under FSDP 2: whichever rank runs out of memory, both go on, as if none had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration import recovery_on_shards
from tests.integration.recovery_on_shards import LAYERS, REFUSED, SAMPLES, SCENARIOS, VARIANTS
from tests.two_processes import run_ranks

Seen = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Seen:
    """Scenario to what ranks 0 and 1 saw."""
    folder = tmp_path_factory.mktemp("shards")
    ranks = run_ranks(Path(recovery_on_shards.__file__), folder, *SCENARIOS, timeout_s=600)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stdout + rank.stderr for rank in ranks)
    by_rank = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return {one["scenario"]: [one, other] for one, other in zip(*by_rank, strict=True)}


@pytest.fixture(scope="module")
def variants(tmp_path_factory) -> Seen:
    """Variant to what ranks 0 and 1 saw."""
    folder = tmp_path_factory.mktemp("variants")
    run_ranks(Path(recovery_on_shards.__file__), folder, *VARIANTS, *REFUSED, timeout_s=600)
    by_rank = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return {one["scenario"]: [one, other] for one, other in zip(*by_rank, strict=True)}


ROUNDING = {"bf16": 1e-3}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_weights_are_those_of_a_run_that_did_not_fail_whatever_the_model_and_the_trainer_do(name, variants):
    for rank in variants[name]:
        assert rank["said"] == ""
        assert rank["error"] < ROUNDING.get(name, 1e-6)
    is_skipped = name.startswith("skipped")
    assert sum(rank["n"] for rank in variants[name]) == (0 if is_skipped else len(VARIANTS[name][1]))
    assert [rank["skipped"] for rank in variants[name]] == [int(is_skipped)] * 2
    if name == "nothing fails, accumulated":
        assert [rank["error"] for rank in variants[name]] == [0.0, 0.0]


def test_where_parameters_stay_gathered_a_rank_splits_its_evaluation_batches_alone(variants):
    zero, one = variants["gathered in evaluation"]
    sanity_and_training = [-8, -8, *[8] * 6]
    # Of six and of four batches, the fourth and the third do not fit.
    assert zero["seen"] == [*sanity_and_training, -8, -8, -8, -8, *[-4] * 6]
    assert one["seen"] == [*sanity_and_training, -8, -8, -8, *[-4] * 4]
    for rank in (zero, one):
        logged, expected = rank["logged"]
        assert logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["mean over the ranks", "sum, over the ranks", "bf16"])
def test_values_that_are_logged_over_the_ranks_are_those_of_whole_batches(name, variants):
    for rank in variants[name]:
        logged, expected = rank["logged"]
        assert {"synced", "synced_step", "synced_epoch", "val_loss"} <= logged.keys()
        assert logged == pytest.approx(expected, rel=0.01 if name == "bf16" else 1e-5)
    assert variants[name][0]["logged"][0]["synced_epoch"] == variants[name][1]["logged"][0]["synced_epoch"]


def test_a_last_part_that_fails_is_run_again_in_smaller_ones_on_both_ranks(variants):
    zero, one = variants["last part"]
    assert zero["seen"][:11] == [8, 8, 8, 4, 4, 2, 2, 2, 2, 2, 2]
    assert one["seen"][:11] == [8, 8, 8, 2, 4, 4, 2, 2, 2, 2, 2]


def test_what_cannot_be_taken_back_is_refused_by_name(variants):
    for rank in variants["whole gradients"]:
        assert rank["said"].startswith(
            "ValueError: OOMRecovery cannot take back a step after set_requires_gradient_sync(F"
        )
    for rank in variants["gives up"]:
        assert rank["said"].startswith("OutOfMemoryError: ")
        assert "on rank 1, each of its 8 samples alone is too large; skip_batch=True skips such a batch" in rank["said"]
    _, failed = variants["gathers features"]
    words = "with other samples the step starts other collectives (allgather of 96 numbers instead of at most "
    assert words in failed["said"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_ranks_have_the_weights_of_a_run_that_did_not_fail(name, seen):
    for rank in seen[name]:
        assert rank["error"] < 1e-6  # float32, whose weights are below 0.3
        assert rank["moved"] > 0.01
        assert rank["global_step"] == 6


@pytest.mark.parametrize("name", SCENARIOS)
def test_buffers_metrics_and_logged_values_see_each_batch_once(name, seen):
    for rank in seen[name]:
        assert rank["count"] == 6 * SAMPLES
        assert rank["metric"] == pytest.approx(rank["healthy_metric"], rel=1e-5)
        assert rank["logged"] == pytest.approx(rank["healthy_logged"], abs=1e-6)


def test_all_ranks_run_equally_many_parts(seen):
    for layer in range(LAYERS):
        zero, one = seen[f"backward_of_block_{layer}"]
        # Rank 0's third batch is wrong as well; a stand-in of two samples takes rank 1's place in what is left of it.
        # From then on rank 1 asks for two parts.
        assert zero["seen"] == [8, 8, 8] + [4, 4] * 4
        assert one["seen"] == [8, 8, 8, 2] + [4, 4] * 4
        assert (zero["recoveries"], one["recoveries"]) == (0, 1)
