"""The course of a trial, and what counts as a failure."""

from __future__ import annotations

import csv
import os
import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_memtools import GradientCheckpointing, LossCurves, MemoryMonitor, default_callbacks
from lightning_memtools.batch_size.trainer.trial_probe import TrialProbe
from tests.lightning_models import assert_same_bits
from tests.tuner_runs import WIDTH, Constant, N, Small, Tuner, everything_of, fit


def test_callbacks_take_part_except_those_that_only_watch(tmp_path):
    present = []

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            present.append([type(callback).__name__ for callback in trainer.callbacks])

    average = WeightAveraging(avg_fn=lambda old, new, n: old)
    fit(tmp_path, Tuner(), None, average, Looks(), EarlyStopping("val_loss"), MemoryMonitor())
    in_trials = [names for names in present if "TrialProbe" in names]
    assert in_trials
    assert all(set(names) == {"WeightAveraging", "Looks", "BatchSizeTuner", "TrialProbe"} for names in in_trials)
    assert "TrialProbe" not in present[-1]
    assert {"BatchSizeTuner", "EarlyStopping", "MemoryMonitor"} <= set(present[-1])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("is_swallowed", [False, True])
def test_an_out_of_memory_error_that_the_step_hides_is_a_failed_trial(tmp_path, is_swallowed):
    class Fails(Small):
        def training_step(self, batch, batch_idx):
            try:
                return super().training_step(batch, batch_idx)
            except torch.OutOfMemoryError as error:
                if is_swallowed:
                    return None
                raise ValueError("forward failed") from error

    tuner = Tuner(stages=("train",), init_val=200, max_trials=6)
    fit(tmp_path, tuner, Fails())
    assert tuner.result.trials[0].outcome == "out of memory"
    assert tuner.result.sizes["train"] > 30


class Killer(Dataset[Tensor]):
    """Its workers are killed when a batch would be larger than 10, as the kernel does when the host has no memory."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.ones(WIDTH)


def kill(samples):
    if len(samples) > 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.stack(samples)


@pytest.mark.filterwarnings("ignore:.*os.fork.*:DeprecationWarning")
def test_a_killed_worker_is_a_failed_trial(tmp_path):
    loader = DataLoader(Killer(), 2, num_workers=1, collate_fn=kill)
    tuner = Tuner(stages=("train",), max_trials=5)
    fit(tmp_path, tuner, None, loaders=loader)
    assert "a data-loader worker was killed" in {trial.outcome for trial in tuner.result.trials}
    assert tuner.result.sizes["train"] <= 10


class Layers(Constant):
    """A Sequential that checkpointing can cut."""

    def __init__(self, batch_size=4, n=N):
        super().__init__(batch_size, n)
        self.body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Tanh(), nn.Sigmoid())))

    def loss(self, x):
        return super().loss(self.body(x * self.scale))


def test_a_trial_runs_what_a_fit_runs(tmp_path):
    seen: list[tuple[str, int]] = []
    found = []

    class Counts(Constant):
        def is_trial(self):
            return any(isinstance(c, TrialProbe) for c in self.trainer.callbacks)

        def training_step(self, batch, batch_idx):
            if self.is_trial():
                found.append((torch.is_autocast_enabled("cpu"), self.trainer.strategy.model is self, self.training))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if self.is_trial():
                found.append((torch.is_autocast_enabled("cpu"), self.trainer.strategy.model is self, not self.training))
                seen.append(("val", len(batch)))

        def on_before_optimizer_step(self, optimizer):
            if self.is_trial():
                assert type(optimizer) is torch.optim.AdamW
                seen.append(("step", len(optimizer.state)))

    tuner = Tuner(init_val=4, max_trials=2, max_val=20)
    fit(tmp_path, tuner, Counts(), precision="bf16-mixed")
    assert set(found) == {(True, True, True)}
    trials = tuner.result.trials
    assert all(trial.fits for trial in trials)
    # Two steps (the second finds the optimizer's state), validation, two steps.
    n_states = 3
    expected = []
    for trial in trials:
        val = trial.size if trial.stage == "val" else 4
        evaluation = [("val", val), ("val", val)]
        expected += [("step", 0), ("step", n_states), *evaluation, ("step", n_states), ("step", n_states)]
    assert seen == expected


def test_checkpointing_is_applied_in_trials(tmp_path, capsys):
    tuner = Tuner(stages=("train",), max_trials=5)
    tuned, run = fit(tmp_path, tuner, Layers(n=100), GradientCheckpointing())
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("predicted peak (simulated)") == 1, "reported for the fit, and not for each trial"
    size = tuner.result.sizes["train"]
    by_hand, other = fit(tmp_path, None, Layers(size, n=100), GradientCheckpointing(), limit_val_batches=0)
    assert_same_bits(everything_of(tuned, run), everything_of(by_hand, other))
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, None, Layers(size, n=100), limit_val_batches=0)


def watching():
    # LossCurves holds losses until the device has them ready: a few hundred bytes more or less, by the clock.
    return [callback for callback in default_callbacks() if not isinstance(callback, LossCurves)]


def test_watching_callbacks_report_nothing_of_trials(tmp_path, capsys):
    tuner = Tuner(init_val=150, stages=("train",), max_trials=6)
    roots = tmp_path / "tuned", tmp_path / "hand"
    tuned, run = fit(roots[0], tuner, None, *watching(), logger=CSVLogger(roots[0]))
    assert tuner.result.trials[0].outcome == "out of memory"
    size = tuner.result.sizes["train"]
    assert size > 30
    assert not [*tmp_path.rglob("oom*")]
    assert "OOMReport" not in capsys.readouterr().out
    by_hand, other = fit(roots[1], None, Small(batch_size=size), *watching(), logger=CSVLogger(roots[1]),
                         limit_val_batches=0)  # fmt: skip
    assert_same_bits(everything_of(tuned, run), everything_of(by_hand, other))
    for one, wanted in zip(*map(logged, roots), strict=True):
        assert one == wanted


def logged(folder):
    """Returns the logged rows without times and without the host's memory."""
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for name in [name for name in row if name.startswith(("time/", "memory/host", "memory/cache/ms"))]:
            del row[name]
    assert any(row["memory/train/peak_reserved_gib"] for row in rows)
    assert any(row["memory/ooms"] for row in rows)
    return rows
