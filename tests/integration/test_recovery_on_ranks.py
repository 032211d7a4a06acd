"""Two real processes on the CPU: a rank that runs out of memory goes on, and both have the weights of a healthy run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.integration import recovery_on_ranks
from tests.integration.recovery_on_ranks import REASONS, SAMPLES, SCENARIOS
from tests.two_processes import run_ranks, run_script, seen_by_ranks

Seen = dict[str, list[dict[str, Any]]]
LASTING = [name for name in SCENARIOS if name not in REASONS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def seen(folder) -> Seen:
    """Scenario to what ranks 0 and 1 saw."""
    by_rank = seen_by_ranks(Path(recovery_on_ranks.__file__), folder, *LASTING, timeout_s=600)
    return {one["scenario"]: [one, other] for one, other in zip(*by_rank, strict=True)}


@pytest.mark.parametrize("name", LASTING)
def test_both_ranks_have_the_weights_of_a_run_that_did_not_fail(name, seen):
    zero, one = seen[name]
    assert zero["digest"] == one["digest"]
    assert zero["error"] < 1e-7  # float32, whose weights are below 0.1
    assert zero["moved"] > 0.05
    expected = {"accumulation": 3, "accumulation_in_backward": 2}.get(name, 6)
    assert zero["global_step"] == one["global_step"] == expected
    # The buffer counts the samples of rank 0, whose buffers DDP gives to all; attempts that failed are taken back.
    assert zero["count"] == 6 * SAMPLES


def test_only_the_rank_that_failed_runs_its_batch_again(seen):
    for layer in range(recovery_on_ranks.LAYERS):
        zero, one = seen[f"backward_of_layer_{layer}"]
        assert zero["seen"] == [8] * 6
        # The third batch fails; from then on there are two parts.
        assert one["seen"] == [8, 8, 8] + [4, 4] * 4
    both = seen["both_ranks"]
    assert both[0]["seen"] == both[1]["seen"] == one["seen"]


def test_a_part_that_fails_last_is_run_again_in_smaller_ones(seen):
    assert "in up to 4 parts" in seen["last_micro_batch"][1]["remark"]
    assert "in up to 4 parts" in seen["planned_parts"][1]["remark"]
    assert seen["last_micro_batch"][0]["seen"] == seen["planned_parts"][0]["seen"] == [8] * 6
    assert seen["last_micro_batch"][1]["seen"][:9] == [8, 8, 8, 4, 4, 2, 2, 2, 2]


def test_the_other_rank_is_told_in_the_summary(seen):
    zero, one = seen["forward"]
    assert zero["remark"] == f"Rank 1: {one['own_remark']}"
    assert "again in up to 2 parts" in one["own_remark"]


def test_rank_0_logs_the_recoveries_of_all(seen, folder):
    for name, expected in {"forward": 1, "both_ranks": 2}.items():
        with (folder / name / "metrics.csv").open() as file:
            logged = [row["memory/oom_recoveries"] for row in csv.DictReader(file)]
        assert float([value for value in logged if value][-1]) == expected, seen[name]


def test_a_rank_of_a_dry_run_goes_on_too(tmp_path):
    run_script(Path(recovery_on_ranks.__file__), tmp_path, "pretended", timeout_s=300)


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_where_a_rank_cannot_go_on_both_end(name, reason, tmp_path):
    ranks = run_ranks(Path(recovery_on_ranks.__file__), tmp_path, name, timeout_s=300)
    assert all(rank.returncode != 0 for rank in ranks)
    assert "not run this step" in ranks[1].stderr
    assert reason in ranks[1].stderr
    assert "Connection closed by peer" in ranks[0].stderr
    (page,) = (tmp_path / "reports").glob("*.md")
    assert reason in page.read_text()
