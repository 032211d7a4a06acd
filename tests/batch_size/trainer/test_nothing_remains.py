"""A search restores everything."""

from __future__ import annotations

import copy
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.batch_size_tuner import tune_batch_size
from lightning_memtools.memory.sizes import MIB
from tests.lightning_models import assert_same_bits, trainer
from tests.tuner_runs import Data, Small, Tuner, fit


class Spy(L.Callback):
    """Sees everything, changes its own attributes, and keeps memory on the device."""

    def __init__(self):
        self.steps = 0
        self.history = {"sizes": []}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.kept = torch.empty(8 * MIB, dtype=torch.uint8)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        self.history["sizes"].append(len(batch))
        Path(trainer.default_root_dir, f"step{self.steps}").touch()
        if trainer.logger:
            trainer.logger.log_metrics({"spied": 1.0}, self.steps)


def test_a_search_without_a_fit_restores_everything(tmp_path):
    with VirtualDevice("128MiB") as device:
        L.seed_everything(0, verbose=False)
        spy, model = Spy(), Small()
        loader = DataLoader(Data(), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
        run = trainer(tmp_path, spy, ModelCheckpoint(tmp_path / "checkpoints"), logger=CSVLogger(tmp_path),
                      enable_checkpointing=True)  # fmt: skip
        device.track(model)
        before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), loader.generator.get_state()
        callbacks = run.callbacks
        result = tune_batch_size(run, model, train_dataloaders=loader)
        assert result.sizes["train"] > 30
        assert_same_bits(before[0], dict(model.state_dict()))
        assert torch.equal(loader.generator.get_state(), before[2])
        assert loader.batch_size == 4
        assert (model.seen, spy.steps, spy.history, hasattr(spy, "kept")) == ([], 0, {"sizes": []}, False)
        assert all(p.grad is None for p in model.parameters())
        assert model.training
        assert run.global_step == run.current_epoch == 0
        assert run.fit_loop.epoch_loop.batch_progress.total.ready == 0
        assert not any(optimizer.state for optimizer in run.optimizers)
        assert run.callbacks is callbacks
        assert not any("step" in path.name for path in tmp_path.rglob("*"))
        assert not [*tmp_path.rglob("*.ckpt")]
        assert "spied" not in "".join(path.read_text() for path in tmp_path.rglob("metrics.csv"))
        run.fit(model, DataLoader(Data(), result.sizes["train"]))
        assert spy.steps == run.global_step > 0


def test_an_error_that_is_not_about_memory_is_raised_unchanged(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)

    class Breaks(Small):
        def training_step(self, batch, batch_idx):
            raise KeyError("from the user's step")

    model = Breaks()
    with pytest.raises(KeyError, match="from the user's step"):
        fit(tmp_path, Tuner(), model)
    assert not [*(tmp_path / "temporary").iterdir()]
    assert model.hparams["batch_size"] == 4
