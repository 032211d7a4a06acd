"""An attention mask of ones is left out of a traced step if it is left out of the real one, and only then."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.checkpointing.planning import plan_checkpoints
from lightning_memtools.simulation.attention_masks import masks_left_out
from tests.checkpointing.foreign_models import made, measured_peak

masking = pytest.importorskip("transformers.masking_utils")
ONES = torch.ones(2, 5, dtype=torch.long)
PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
WORDS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])


@pytest.mark.parametrize(("name", "padding"), [("bert", 0), ("bert", 8), ("pegasus", 0)])
def test_the_predicted_peak_is_the_measured_one_with_and_without_padding(name, padding):
    model, batch = made(name)
    if padding:
        batch["attention_mask"][0, -padding:] = 0
    plan = plan_checkpoints(model, batch, bn_dropout="recompute")
    assert plan.refused is None
    assert measured_peak(model, batch, plan) == plan.peak_bytes


@pytest.mark.parametrize(
    ("batch", "left_out"),
    [
        ({"input_ids": WORDS, "attention_mask": ONES, "token_type_ids": 0 * ONES}, True),
        ({"input_ids": WORDS, "attention_mask": PADDED}, False),
        ({"input_ids": WORDS}, True),
        ((WORDS, ONES), True),
        ((WORDS, PADDED), False),
        ((WORDS, PADDED.bool()), False),
        ((WORDS.to("meta"), ONES), False),
    ],
)
def test_masks_are_taken_for_ones_if_those_of_the_batch_are(batch, left_out):
    plain = masking.is_tracing
    with masks_left_out(batch):
        assert (masking.is_tracing is not plain) is left_out
        assert masking.is_tracing(ONES) is False
    assert masking.is_tracing is plain
