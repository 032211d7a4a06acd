"""TrainingDoctor on two ranks on the CPU over gloo."""

from __future__ import annotations

from pathlib import Path

from tests.two_processes import seen_by_ranks

SCRIPT = Path(__file__).with_name("doctor_on_ranks.py")


def test_a_mistake_on_one_rank_ends_training_on_both_at_the_same_step(tmp_path):
    first, second = seen_by_ranks(SCRIPT, tmp_path, timeout_s=240)
    assert first["said"] == second["said"]
    assert "retained_graphs (error), KeepsOnOneRank.total" in first["said"]
    assert first["steps"] == second["steps"] == 8
