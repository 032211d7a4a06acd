"""Where the batch size is found, and what the data have to say to it."""

from __future__ import annotations

import lightning as L
import torch
from torch.utils.data import DataLoader

from tests.lightning_models import assert_same_bits
from tests.tuner_runs import Data, N, Small, Tuner, everything_of, fit


class Module(L.LightningDataModule):
    per_step = 4

    def train_dataloader(self):
        return DataLoader(Data(), self.per_step)


def test_an_attribute_of_the_data_module(tmp_path):
    data = Module()
    tuner = Tuner(batch_arg_name="per_step", stages=("train",))
    model, _ = fit(tmp_path, tuner, datamodule=data)
    assert data.per_step == tuner.result.sizes["train"]
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
