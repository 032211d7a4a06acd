"""Tests of plan_checkpoints: what it finds, chooses, predicts and refuses."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.checkpointing.planning import plan_checkpoints
from tests.checkpointing.models import conv_bn_relu, encoder, nested


def test_skip_is_refused_where_only_recompute_saves_memory_and_the_refusal_says_so():
    sample = torch.empty(4, 3, 32, 32)
    model = conv_bn_relu(16, 8)
    skip, recompute = (plan_checkpoints(model, sample, bn_dropout=mode) for mode in ("skip", "recompute"))
    assert skip.refused is not None
    assert 'With bn_dropout="recompute", BatchNorm and Dropout layers may run twice' in skip.refused
    assert skip.chains == ()
    assert recompute.refused is None
    assert recompute.peak_bytes < 0.6 * recompute.plain_peak_bytes
    assert recompute.extra_operations <= 0.33
    assert skip.left_out["1"] == "BatchNorm2d never runs twice"


@pytest.mark.parametrize(("segments", "ranges"), [(1, []), (3, [(0, 3), (3, 6)]), (4, [(0, 2), (2, 4), (4, 6)])])
def test_chunks_are_those_of_checkpoint_sequential(segments, ranges):
    plan = plan_checkpoints(encoder(10), torch.empty(16, 24, 32), segments=segments)
    assert [one for chain in plan.chains for one in chain.ranges] == ranges


def test_the_budget_is_kept_with_less_recomputation_the_larger_it_is():
    model, x = encoder(8, 0.0), torch.empty(16, 24, 32)
    plain = plan_checkpoints(model, x, memory_budget=1.0)
    assert plain.extra_operations == 0
    assert "within the budget" in (plain.refused or "")
    extras = []
    for share in (0.9, 0.6, 0.4):
        plan = plan_checkpoints(model, x, memory_budget=share)
        assert plan.planned.activation_bytes <= share * plan.plain.activation_bytes
        extras.append(plan.extra_operations)
    assert extras == sorted(extras)
    assert extras[0] > 0
    limit = plan_checkpoints(model, x).plain_peak_bytes // 2
    assert plan_checkpoints(model, x, memory_budget=f"{limit}B").peak_bytes <= limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 0}, "segments=0 is not a number of chunks: give an int of at least 1"),
        ({"segments": True}, "segments=True"),
        ({"segments": 2.0}, "segments=2.0"),
        ({"memory_budget": 0.0}, "memory_budget=0.0 is not a share"),
        ({"memory_budget": 1.5}, "memory_budget=1.5 is not a share"),
        ({"memory_budget": 1}, "a bare int never means either"),
        ({"memory_budget": "8"}, "Not a size: '8'"),
        ({"memory_budget": "0GiB"}, "leaves no memory at all"),
        ({"bn_dropout": "avoid"}, "bn_dropout='avoid' is neither"),
        ({"include": "blocks.*"}, r"give a list of patterns, as include=\['blocks"),
        ({"include": ["nothing.*"]}, r"pattern 'nothing\.\*' matches no module of Sequential. Examples of its names: "),
        ({"exclude": ["9"]}, "exclude: the pattern '9' matches no module"),
        ({"segments": 2, "memory_budget": 0.5}, "contradict each other"),
    ],
)
def test_errors_of_options_name_the_value_and_what_is_accepted(options, message):
    with pytest.raises(ValueError, match=message):
        plan_checkpoints(nested(), torch.empty(6, 32), **options)
