from __future__ import annotations

import csv
from itertools import pairwise

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_memtools import LossCurves, MemoryMonitor
from tests.event_files import scalars
from tests.lightning_models import Adversaries, Regression, loader, trainer


def approx(points):
    return [(step, pytest.approx(value, rel=1e-5)) for step, value in points]


def mean(values):
    return sum(values) / len(values)


def means(losses, steps, first=0):
    """The mean of the losses since the last point, at each step that has one."""
    return approx([(step, mean(losses[last + 1 : step + 1])) for last, step in pairwise([first - 1, *steps])])


def test_each_point_is_the_mean_of_the_losses_since_the_last_point(tmp_path):
    model = Regression()
    fit = trainer(tmp_path, LossCurves(every_n_steps=15), max_epochs=2)
    fit.fit(model, loader(160, 8), loader(24, 8))
    curves = scalars(fit.log_dir)
    # Twenty steps an epoch: the first steps, each fifteenth, and the end of each epoch.
    assert curves["loss/train"] == means(model.train_losses, [0, 1, 2, 4, 8, 14, 16, 19, 29, 32, 39])
    assert curves["loss/val"] == approx([(19, mean(model.val_losses[0:3])), (39, mean(model.val_losses[3:6]))])


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_the_first_steps_are_logged_once_by_every_logger_also_in_a_run_that_goes_on(tmp_path):
    def logged(folder):
        curves = scalars(tmp_path / folder)
        table = csv.DictReader((tmp_path / f"{folder}-table" / "metrics.csv").read_text().splitlines())
        rows = [int(row["step"]) for row in table if row["memory/host_rss_gib"]]
        assert [step for step, _ in curves["memory/host_rss_gib"]] == rows
        assert [step for step, _ in curves["loss/train"]] == rows
        return rows

    def made(folder, **options):
        loggers = [TensorBoardLogger(tmp_path, "", folder), CSVLogger(tmp_path, "", f"{folder}-table")]
        return trainer(tmp_path, MemoryMonitor(), LossCurves(), logger=loggers, log_every_n_steps=10, **options)

    begun = made("begun")
    begun.fit(Regression(), loader(40, 8))
    begun.save_checkpoint(tmp_path / "at.ckpt")
    begun.fit_loop.max_epochs = 2
    begun.fit(Regression(), loader(40, 8))
    assert logged("begun") == [0, 1, 2, 4, 8, 9]
    resumed = made("resumed", max_epochs=2, max_steps=35)
    resumed.fit(Regression(), loader(400, 8), ckpt_path=tmp_path / "at.ckpt", weights_only=False)
    assert logged("resumed") == [8, 9, 16, 19, 29, 32, 34]
    never = made("never", max_steps=3, max_epochs=-1)
    never.log_every_n_steps = 0
    never.fit(Regression(), loader(400, 8))
    assert [step for step, _ in scalars(tmp_path / "never")["loss/train"]] == [2]  # the end of the epoch alone


def test_the_division_of_gradient_accumulation_is_undone(tmp_path):
    model = Regression()
    fit = trainer(tmp_path, LossCurves(), accumulate_grad_batches=3)
    fit.fit(model, loader(32, 8))  # four micro-batches: a step of three and a last one of one
    losses = model.train_losses
    assert scalars(fit.log_dir)["loss/train"] == approx([(0, mean(losses[:3])), (1, losses[3])])


def test_validation_losses_are_weighted_by_batch_size(tmp_path):
    model = Regression()
    fit = trainer(tmp_path, LossCurves())
    fit.fit(model, loader(), loader(20, 16))  # batches of 16 and 4
    first, second = model.val_losses
    assert scalars(fit.log_dir)["loss/val"] == approx([(3, (16 * first + 4 * second) / 20)])


class LogsItsLosses(Regression):
    """Logs its losses, as most modules do, and returns another figure from validation."""

    val_name = "val_loss"

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)  # must not be taken for a validation loss
        return {"loss": loss, "aux": 3 * loss}

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)
        self.log(self.val_name, loss)
        self.log("val_accuracy", 0.5)
        return 1000 * loss


@pytest.mark.parametrize("name", ["val_loss", "val/loss", "valid_loss", "my_eval_loss", "loss"])
def test_a_logged_validation_loss_is_found_by_itself(tmp_path, name):
    model = LogsItsLosses()
    model.val_name = name
    fit = trainer(tmp_path, LossCurves())
    fit.fit(model, loader(), loader(16, 8))
    assert scalars(fit.log_dir)["loss/val"] == approx([(3, mean(model.val_losses))])


def test_manual_optimization_with_two_losses(tmp_path):
    model = Adversaries()
    fit = trainer(tmp_path, LossCurves(every_n_steps=2))
    fit.fit(model, loader())
    curves = scalars(fit.log_dir)
    for name, losses in model.losses.items():
        assert curves[f"loss/train/{name}"] == means(losses, [0, 1, 2, 3])


def test_every_validation_loader_has_a_curve(tmp_path):
    class TwoLoaders(Regression):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", self.loss(batch))
            self.log("val_other", 1.0)

    model = TwoLoaders()
    fit = trainer(tmp_path, LossCurves())
    fit.fit(model, loader(), [loader(8), loader(8, seed=1)])
    curves = scalars(fit.log_dir)
    for i in (0, 1):
        assert curves[f"loss/val/dataloader_idx_{i}"] == curves[f"val_loss/dataloader_idx_{i}"]
