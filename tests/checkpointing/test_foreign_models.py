"""Models that nobody here wrote are planned by default, trained bit for bit as without, and need what was predicted."""

from __future__ import annotations

import re

import pytest

from lightning_memtools.checkpointing.planning import BudgetTooSmallError, plan_checkpoints
from lightning_memtools.memory.sizes import format_size
from tests.checkpointing.foreign_models import FOREIGN, made, measured_peak, trains_the_same


@pytest.mark.parametrize("name", FOREIGN)
def test_training_is_bitwise_the_same_and_the_peak_is_the_predicted_one(name):
    model, batch = made(name)
    plan = plan_checkpoints(model, batch, bn_dropout="recompute")
    assert plan.refused is None
    assert plan.peak_bytes < 0.99 * plan.plain_peak_bytes
    assert measured_peak(model, batch, plan) == pytest.approx(plan.peak_bytes, rel=0.01)
    assert measured_peak(model, batch, None) == pytest.approx(plan.plain_peak_bytes, rel=0.01)
    for bf16 in (False, True):
        assert trains_the_same(name, plan, bf16=bf16) == {}


def test_a_budget_out_of_reach_names_the_smallest_peak_and_its_plan():
    model, batch = made("bert")
    with pytest.raises(BudgetTooSmallError) as caught:
        plan_checkpoints(model, batch, bn_dropout="recompute", memory_budget=0.01)
    smallest = re.search(
        r"No plan fits memory_budget=0\.01 .*"
        r"The smallest reachable peak is ([\d.]+ [KM]iB), 0\.\d+ of the plain step's activations, by recomputing "
        r"[^(]*bert\.encoder\.layer\.[^(]* \(\d+% more operations\)\.",
        str(caught.value),
    )
    plan = plan_checkpoints(model, batch, bn_dropout="recompute", memory_budget=f"{caught.value.reachable_bytes}B")
    assert smallest is not None, str(caught.value)
    assert format_size(plan.peak_bytes) == smallest[1]


def test_a_pattern_that_matches_nothing_names_near_ones():
    model, batch = made("gpt2")
    with pytest.raises(ValueError, match=r"matches no module of LossOf.* names: .*'model\.transformer\.h\.0'"):
        plan_checkpoints(model, batch, include=["model.transformers.h.*"])


def test_caches_are_off_where_blocks_run_twice_and_on_elsewhere():
    model, batch = made("gpt2")
    plan = plan_checkpoints(model, batch, bn_dropout="recompute")
    with plan.apply(model):
        assert model.model(**batch).past_key_values is None
        assert model.model.config.use_cache
        assert model.eval().model(**batch).past_key_values.get_seq_length() == batch["input_ids"].shape[1]
