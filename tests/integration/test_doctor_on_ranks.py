"""TrainingDoctor on two ranks on the CPU over gloo."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.two_processes import seen_by_ranks

SCRIPT = Path(__file__).with_name("doctor_on_ranks.py")


def ran(folder, kind):
    folder.mkdir()
    return seen_by_ranks(SCRIPT, folder, kind, timeout_s=240)


def test_a_mistake_on_one_rank_ends_training_on_both_at_the_same_step(tmp_path):
    first, second = ran(tmp_path / "run", "broken")
    assert first["said"] == second["said"]
    assert "retained_graphs (error), KeepsOnOneRank.total" in first["said"]
    assert first["steps"] == second["steps"] == 8


def test_healthy_ranks_end_in_the_same_bits_with_and_without(tmp_path):
    assert [one["said"] for one in ran(tmp_path / "with", "healthy")] == ["", ""]
    ran(tmp_path / "without", "without")
    for rank in (0, 1):
        one, other = (torch.load(tmp_path / kind / f"{rank}.pt") for kind in ("with", "without"))
        assert all(torch.equal(one[name], other[name]) for name in other)
