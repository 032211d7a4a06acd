"""Sizes that a user can rely on: not below the configured one, true in the fit that follows, found within a budget."""

from __future__ import annotations

import pytest

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.batch_size_tuner import BatchSizeTuner
from tests.batch_size_models import Adversarial, IndexLimit, trainer_for
from tests.fake_training import InMemory, fake_tensors, fakes_of


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
