"""Sizes that a user can rely on: not below the configured one, true in the fit that follows, found within a budget."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.batch_size_tuner import BatchSizeTuner
from tests.batch_size_models import Adversarial, IndexLimit, trainer_for
from tests.fake_training import InMemory, fake_tensors, fakes_of
from tests.tuner_runs import Constant, Tuner, fit


@pytest.mark.filterwarnings("ignore:Total length of `FakeLoader`")
@pytest.mark.parametrize("capacity", ["32MiB", "64MiB", "128MiB"])
def test_networks_trained_in_turn_by_hand_survive_the_fit_with_no_fewer_samples_than_configured(tmp_path, capacity):
    tuner = BatchSizeTuner(stages=("train",))
    with fake_tensors(VirtualDevice(capacity)):
        model = fakes_of(Adversarial)()
        trainer = trainer_for(Adversarial, tmp_path, tuner, max_steps=100, limit_val_batches=0, plugins=[InMemory()])
        trainer.fit(model)
    assert trainer.global_step == 100
    assert model.batch_size == tuner.result.sizes["train"] >= 16


def test_a_size_that_an_operator_refuses_is_an_upper_bound_and_its_error_is_quoted(tmp_path):
    tuner = BatchSizeTuner(stages=("train",))
    with VirtualDevice("2GiB"):
        model = IndexLimit()
        trainer_for(IndexLimit, tmp_path, tuner, limit_val_batches=0).fit(model)
    assert 0.95 * IndexLimit.most <= model.batch_size <= IndexLimit.most
    assert sum("canUse32BitIndexMath" in note for note in tuner.result.notes) == 1


def test_the_effective_batch_stays_and_trains_to_the_same_weights(tmp_path):
    tuner = Tuner(stages=("train",), effective_batch_size=160, max_trials=8)
    kept, trainer = fit(tmp_path, tuner, Constant(batch_size=80), accumulate_grad_batches=2, max_epochs=1)
    size = tuner.result.sizes["train"]
    assert size < 80  # which does not fit
    assert size * trainer.accumulate_grad_batches == tuner.result.effective_batch_size == 160
    _, plain = fit(tmp_path, None, Constant(batch_size=size), accumulate_grad_batches=160 // size, max_epochs=1)
    assert trainer.global_step == plain.global_step == 2  # of 200 samples
    for ours, theirs in zip(kept.parameters(), plain.lightning_module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
