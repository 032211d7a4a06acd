"""Healthy models and evaluations that look odd: HaltOnNaN neither ends nor changes them, with and without skips."""

from __future__ import annotations

import copy
import json
import pickle
from shlex import quote
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, SpikeDetection

from lightning_memtools import default_callbacks
from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite.bad_step import NonFiniteError
from tests.lightning_models import Regression, loader, trainer
from tests.nonfinite.healthy_models import HEALTHY, Expanded, Lazy
from tests.nonfinite.observe import Observer, differences, error_at_halt, state_bits

SKIPS = pytest.mark.parametrize("max_skips", [0, 3])


def same_with_and_without(make, tmp_path, *, max_skips, **options):
    """Train with and without HaltOnNaN; everything must end in the same bits. Returns the module trained with it."""
    ends, models = [], []
    for callbacks in ([], [HaltOnNaN(max_skips=max_skips)]):
        L.seed_everything(0, verbose=False)
        model = make()
        run = trainer(tmp_path, *callbacks, logger=False, **options)
        run.fit(model, loader(64), loader(16, seed=1))
        ends.append({**state_bits(model, run.optimizers), "random": torch.get_rng_state()})
        models.append(model)
    assert differences(*ends) == []
    return models[1]


class Metrics(Regression):
    """Its metrics are NaN and Inf by design."""

    fused = False

    def validation_step(self, batch, batch_idx):
        self.log("recall_of_absent_class", torch.tensor(torch.nan))
        self.log("best_so_far", torch.tensor(torch.inf))
        if self.trainer.sanity_checking:
            self.log("val_loss", torch.tensor(torch.nan))
        return {"loss": self.loss(batch), "pearson": torch.tensor(torch.nan), "logits": torch.tensor([torch.nan, 0.0])}

    test_step = validation_step


@SKIPS
def test_metrics_that_are_not_finite_by_design_do_not_end_a_run(max_skips: int, tmp_path: Any) -> None:
    callback = HaltOnNaN(max_skips=max_skips, directory=str(tmp_path / "out"))
    run = trainer(tmp_path, callback, logger=False, num_sanity_val_steps=2, max_epochs=2)
    run.fit(Metrics(), loader(), loader())
    run.test(Metrics(), loader(), verbose=False)
    assert run.state.finished
    assert not (tmp_path / "out").exists()


def test_the_default_callbacks_leave_such_a_run_alone(tmp_path: Any) -> None:
    run = trainer(tmp_path, *default_callbacks(), logger=False)
    run.fit(Metrics(), loader(), loader())
    assert run.global_step == 4


def test_a_loss_that_validation_logs_as_nan_halts(tmp_path: Any) -> None:
    class BadLog(Regression):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch) * torch.nan)
            self.log("val_recall", torch.tensor(torch.nan))

    with pytest.raises(NonFiniteError, match=r"val_loss = nan \(rank 0\)") as caught:
        trainer(tmp_path, HaltOnNaN(), logger=False).fit(BadLog(), loader(), loader())
    assert caught.value.stage == "val"


class Watched(Regression):
    """Logs a metric that turns NaN in the third epoch, which other callbacks watch."""

    def validation_step(self, batch, batch_idx):
        self.log("val_pearson", torch.tensor(torch.nan if self.current_epoch == 2 else -float(self.current_epoch)))


@pytest.mark.parametrize("at_the_epochs_end", [True, False])
def test_other_callbacks_treat_a_metric_that_is_nan_as_without_ours(at_the_epochs_end, tmp_path):
    ends = []
    for name, ours in (("without", []), ("with", default_callbacks())):
        stop = EarlyStopping("val_pearson", patience=9, check_finite=True, check_on_train_epoch_end=at_the_epochs_end)
        best = ModelCheckpoint(tmp_path / name, "{epoch}", monitor="val_pearson", save_top_k=2)
        L.seed_everything(0, verbose=False)
        model = Watched()
        run = trainer(tmp_path, stop, best, *ours, logger=False, max_epochs=5, enable_checkpointing=True)
        run.fit(model, loader(), loader())
        assert "val_pearson = nan is not finite" in stop.stopping_reason_message
        assert (stop.stopped_epoch, run.global_step) == (2, 12)
        files = sorted(one.name for one in (tmp_path / name).iterdir())
        ends.append((files, best.best_model_path.rpartition("/")[2], float(best.best_model_score)))
    assert ends[0] == ends[1]
    assert ends[0][1:] == ("epoch=1.ckpt", -1.0)


class Spiking(Regression):
    """Its loss jumps at the fourth step."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1e4 if batch_idx == 3 else 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_pearson", torch.tensor(torch.nan))


@pytest.mark.parametrize("ours", [False, True])
def test_spike_detection_ends_the_run_at_the_same_batch(ours, tmp_path):
    spike = SpikeDetection(warmup=1, exclude_batches_path=tmp_path / "skip.json")
    run = trainer(tmp_path, spike, *(default_callbacks() if ours else []), logger=False)
    with pytest.raises(TrainingSpikeException, match="batch 3"):
        run.fit(Spiking(), loader(64), loader())
    assert json.loads((tmp_path / "skip.json").read_text()) == [2, 3]


@SKIPS
@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.filterwarnings("ignore:.*(lazy|Lazy|uninitialized).*")
def test_a_healthy_model_ends_in_the_same_bits(name: str, max_skips: int, tmp_path: Any) -> None:
    same_with_and_without(HEALTHY[name], tmp_path, max_skips=max_skips)


def spoiled(kind: type[L.LightningModule], bad: int = 5) -> Any:
    class Spoiled(kind):  # type: ignore[misc,valid-type]
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if batch_idx == bad else loss

    return Spoiled


@pytest.mark.parametrize("algorithm", ["value", "norm"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_skipped_under_clipping(algorithm: str, fused: bool, tmp_path: Any) -> None:
    class Fused(spoiled(Regression)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=fused)

    model = Fused()
    options = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm, "logger": False}
    run = trainer(tmp_path, HaltOnNaN(max_skips=1), **options)
    run.fit(model, loader(64))
    assert run.global_step == 8
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.filterwarnings("ignore:.*(lazy|Lazy|uninitialized).*")
def test_lazy_modules_are_finite_after_a_halt(tmp_path: Any) -> None:
    model = spoiled(Lazy)()
    error = error_at_halt(model, loader(64), tmp_path)
    assert error.step == 5
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_odd_buffers_are_restored_at_a_halt(tmp_path: Any) -> None:
    L.seed_everything(0, verbose=False)
    observer = Observer()
    make = spoiled(Expanded)
    trainer(tmp_path, observer, logger=False).fit(make(), loader(64))
    L.seed_everything(0, verbose=False)
    model = make()
    error_at_halt(model, loader(64), tmp_path)
    assert differences(observer.before, state_bits(model, model.trainer.optimizers)) == []


def test_buffers_of_the_bad_first_step_are_as_before_it(tmp_path: Any) -> None:
    model = spoiled(Expanded, bad=0)()
    error_at_halt(model, loader(), tmp_path)
    assert model.centre is None
    assert not hasattr(model, "count")
    assert torch.equal(model.scale, torch.ones(4))


class Pickles(L.Callback):
    n = 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        again = pickle.loads(pickle.dumps(trainer))  # noqa: S301, our own
        assert again.precision_plugin._after_closure.__self__ is again.precision_plugin
        assert again.save_checkpoint.__self__ is again
        copied = copy.deepcopy(trainer.precision_plugin)
        assert "_after_closure" not in vars(copied) or copied._after_closure.__self__ is not trainer
        self.n += 1


def test_a_trainer_can_be_pickled_and_copied_during_fit(tmp_path: Any) -> None:
    probe = Pickles()
    trainer(tmp_path, HaltOnNaN(), probe, logger=False).fit(Regression(), loader())
    assert probe.n == 4


def test_the_printed_command_can_be_pasted_into_a_shell(tmp_path: Any) -> None:
    error = error_at_halt(spoiled(Regression, 1)(), loader(), tmp_path, directory=str(tmp_path / "my run; rm"))
    assert f"memtools replay {quote(str(error.step_path))}" in str(error)
    assert "'" in quote(str(error.step_path))
