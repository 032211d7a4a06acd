"""A search restores everything."""

from __future__ import annotations

import copy
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_memtools import VirtualDevice
from lightning_memtools.batch_size.trainer.trial_runner import TrialRunner
from lightning_memtools.callbacks.batch_size_tuner import tune_batch_size
from lightning_memtools.memory.sizes import MIB
from tests.lightning_models import assert_same_bits, trainer
from tests.tuner_runs import Constant, Data, Small, Tuner, fit


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


def test_random_streams_are_restored_after_a_search(tmp_path):
    with VirtualDevice("128MiB"):
        model = Constant()
        L.seed_everything(3, verbose=False)
        before = torch.get_rng_state()
        tune_batch_size(trainer(tmp_path, logger=False), model)
        assert torch.equal(torch.get_rng_state(), before)


def test_every_trial_frees_what_it_has_allocated(tmp_path, monkeypatch):
    allocated = []
    original = TrialRunner.run

    def run(runner, *arguments, **options):
        reader = VirtualDevice.current()
        before = reader.stats()
        trial = original(runner, *arguments, **options)
        after = reader.stats()
        allocated.append((trial.outcome, before.allocated, after.allocated, after.reserved - before.reserved))
        return trial

    monkeypatch.setattr(TrialRunner, "run", run)
    fit(tmp_path, Tuner(init_val=100, max_trials=5))
    assert "out of memory" in {outcome for outcome, *_ in allocated}
    assert "fits" in {outcome for outcome, *_ in allocated}
    assert all(before == after and grown <= 0 for _, before, after, grown in allocated)


def test_on_fit_start_is_called_before_each_trial(tmp_path):
    calls = []

    class Prepares(Small):
        def on_fit_start(self):
            calls.append(hasattr(self, "factor"))
            self.factor = 1.0

        def loss(self, x):
            return super().loss(x) * self.factor

    fit(tmp_path, Tuner(stages=("train",)), Prepares())
    assert not any(calls), "each call found the module as it was"


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


def test_a_search_in_the_middle_of_training_restores_the_state(tmp_path):
    class Grows(Constant):
        """Takes twice the memory from epoch 1 on."""

        def loss(self, x):
            extra = (x * self.scale).tanh() * (x * self.scale).sigmoid() if self.current_epoch else x
            return super().loss(extra)

    class State(L.Callback):
        """The state at the beginning of each epoch, before and after the tuner's turn."""

        def __init__(self, into):
            self.into = into

        def on_train_epoch_start(self, trainer, pl_module):
            state = {name: value.clone() for name, value in pl_module.state_dict().items()}
            moments = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
            self.into.append((state, moments, trainer.global_step, torch.get_rng_state()))

    before, after = [], []
    tuner = Tuner(at_epochs=(1,), stages=("train",))
    with VirtualDevice("128MiB"):
        L.seed_everything(0, verbose=False)
        model = Grows(n=200)
        run = trainer(tmp_path, State(before), tuner, State(after), logger=False, max_epochs=2, limit_val_batches=0)
        run.fit(model)
    first, second = {trial.size for trial in tuner.result.trials}, tuner.result.sizes["train"]
    assert second in first
    sizes = sorted(set(model.seen), reverse=True)
    assert second in sizes
    assert second < 0.8 * sizes[0]
    one, other = before[1], after[1]
    assert_same_bits(one[0], other[0])
    for index, values in one[1].items():
        assert_same_bits(values, other[1][index])
    assert one[2] == other[2] == -(-200 // sizes[0])
    assert run.global_step == one[2] + -(-200 // second)
    assert torch.equal(one[3], other[3])


def test_a_schedule_for_a_number_of_steps_is_renewed_in_the_middle_of_training(tmp_path):
    class Grows(Small):
        """Takes twice the memory once `grown`."""

        grown = False

        def loss(self, x):
            return super().loss((x * self.scale).tanh() * (x * self.scale).sigmoid() if self.grown else x)

    class Grow(L.Callback):
        """Not by epoch: trials run through epochs too, and take the larger memory into account at once."""

        takes_part_in_trials = False

        def on_train_epoch_end(self, _, model):
            model.grown = True

    tuner = Tuner(at_epochs=(1,), stages=("train",), max_trials=6)
    _, run = fit(tmp_path, tuner, Grows(n=100), Grow(), max_epochs=2)
    steps = -(-100 // tuner.result.sizes["train"])
    assert run.global_step < 2 * steps, "the first epoch had fewer"
    scheduler = run.lr_scheduler_configs[0].scheduler
    (optimizer,) = run.optimizers
    assert scheduler.optimizer is optimizer
    assert scheduler.total_steps == 2 * steps
    assert scheduler.last_epoch == 2 * steps, "it ends with the training"
    anew = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    other = torch.optim.lr_scheduler.OneCycleLR(anew, 1e-2, total_steps=2 * steps)
    for _ in range(2 * steps):
        anew.step()
        other.step()
    for name in ("lr", "min_lr"):
        assert optimizer.param_groups[0][name] == anew.param_groups[0][name]
    assert all(state["step"] == run.global_step for state in optimizer.state.values())
