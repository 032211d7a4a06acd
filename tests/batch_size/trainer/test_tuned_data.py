"""Where the batch size is found, and what the data have to say to it."""

from __future__ import annotations

import re

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning_models import assert_same_bits
from tests.tuner_runs import Data, N, Small, Tuner, everything_of, fit


class Module(L.LightningDataModule):
    def __init__(self, per_step=4, val_per_step=4):
        super().__init__()
        self.per_step, self.val_per_step = per_step, val_per_step

    def train_dataloader(self):
        return DataLoader(Data(), self.per_step)

    def val_dataloader(self):
        return DataLoader(Data(), self.val_per_step)


def test_an_attribute_of_the_data_module_and_several_names(tmp_path):
    data = Module()
    tuner = Tuner(batch_arg_name=["per_step", "val_per_step"])
    model, _ = fit(tmp_path, tuner, datamodule=data)
    assert data.per_step == tuner.result.sizes["train"]
    assert data.val_per_step == tuner.result.sizes["val"]
    assert set(model.seen) == {data.per_step, N % data.per_step}


def test_loaders_passed_to_fit_are_rebuilt_in_the_same_order(tmp_path):
    def loader(size):
        return DataLoader(Data(), size, shuffle=True, generator=torch.Generator().manual_seed(7))

    tuner = Tuner()
    tuned, run = fit(tmp_path, tuner, loaders=loader(4), val_loaders=DataLoader(Data(), 4))
    size = tuner.result.sizes["train"]
    by_hand, other = fit(tmp_path, None, Small(batch_size=size), loaders=loader(size),
                         val_loaders=DataLoader(Data(), 4))  # fmt: skip
    assert tuned.seen == by_hand.seen
    assert_same_bits(everything_of(tuned, run), everything_of(by_hand, other))


def test_a_dataset_smaller_than_the_batch_gives_one_batch(tmp_path):
    tuner = Tuner()
    _, run = fit(tmp_path, tuner, Small(n=20))
    assert tuner.result.sizes == {"train": 20, "val": 20}
    assert run.global_step == 1
    (loud,) = (note for note in tuner.result.notes if note.startswith("LIMITED BY THE SIZE OF THE DATASET"))
    assert "20 is a whole epoch" in loud
    assert "Set max_val" in loud


def test_an_attribute_that_does_not_exist_is_named(tmp_path):
    class Other(Small):
        def __init__(self):
            super().__init__()
            self.batchsize = 4
            del self.hparams["batch_size"]

        def train_dataloader(self):
            return DataLoader(Data(), self.batchsize)

    with pytest.raises(ValueError, match=r"No 'batch_size' in model, model.hparams.* batchsize"):
        fit(tmp_path, Tuner(), Other())


def test_a_validation_loader_that_keeps_its_size_can_be_left_out(tmp_path):
    class FixedValidation(Small):
        def val_dataloader(self):
            return DataLoader(Data(), 8)

    way_out = re.escape('Or tune training alone: BatchSizeTuner(stages=("train",)).')
    with pytest.raises(ValueError, match=f"val_dataloader gives batches of 8.*{way_out}"):
        fit(tmp_path, Tuner(), FixedValidation())
    with pytest.raises(ValueError, match=f"it has batch_size=None.*{way_out}"):
        fit(tmp_path, Tuner(), val_loaders=DataLoader(Data(), batch_size=None))
    tuner = Tuner(stages=("train",))
    fit(tmp_path, tuner, FixedValidation())
    assert tuner.result.sizes["train"] > 4
