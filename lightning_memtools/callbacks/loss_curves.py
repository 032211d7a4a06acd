"""LossCurves: training and validation loss on one chart."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import training_step, values_logged_in_evaluation
from lightning_memtools.callbacks.guarded import WatchingCallback
from lightning_memtools.reporting.loggers import checked_interval, is_due
from lightning_memtools.reporting.loss_names import likely_losses, returned_losses, training_losses
from lightning_memtools.reporting.mean_curves import MeanCurves
from lightning_memtools.reporting.ranks import PATIENCE_S


class LossCurves(WatchingCallback):
    """Logs `loss/train` and `loss/val` on the same axis; TensorBoard's Memory tab draws them in one chart.

    docs/loss-curves.md has the tags, and says which losses are taken.

    Losses are not divided by the number of accumulated batches. With several ranks, values are means over the
    ranks. Steps 0, 1, 2, 4, 8, 16 and 32 have a point, and every epoch ends with one. Values stay on the device until a
    point is due, and are then copied without waiting. The end of an epoch and of a validation run waits for copies that
    have not arrived yet. No rank waits for another one: rank 0 writes a point once the values of all ranks have
    arrived, and leaves out ranks that have fewer batches or have ended.

    Args:
        every_n_steps: The number of training steps between two points; None for the Trainer's `log_every_n_steps`.

    Raises:
        ValueError: `every_n_steps` is below 1.
    """

    page = "loss-curves"
    takes_part_in_trials = False

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        self.every_n_steps = checked_interval(every_n_steps)
        self._train = MeanCurves("loss/train")
        self._val = MeanCurves("loss/val")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the curves of a new run."""
        self._train.begin()
        self._val.begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the batch's loss to the next point, and log the point if it is due."""
        for name, loss in training_losses(trainer, pl_module, outputs).items():
            self._train.add(name, loss)
        self._train.write_arrived()
        self._val.write_arrived()
        if is_due(trainer, self.every_n_steps):
            self._train.log(trainer, training_step(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a point unless the epoch's last step already has one, and wait until all points are written."""
        if self._train.has_values:
            self._train.log(trainer, training_step(trainer) - 1)  # the axis is already one ahead here
        self._train.write_arrived(wait=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start averaging the losses of a new validation run."""
        self._val.clear()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the losses that validation_step returned. They are used if no validation loss is logged as a metric."""
        if not trainer.sanity_checking:
            suffix = f"/dataloader_idx_{dataloader_idx}" if len(trainer.num_val_batches) > 1 else ""
            for name, loss, weight in returned_losses(outputs, batch):
                self._val.add(name + suffix, loss, weight)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the mean loss of the validation run."""
        if trainer.sanity_checking:
            return
        logged = values_logged_in_evaluation(trainer)
        if names := likely_losses(logged):
            # A loss that the user logs takes the place of those that the step returns.
            self._val.clear()
            for name in names:
                self._val.add(name, logged[name])
        self._val.log(trainer, training_step(trainer))
        self._val.write_arrived(wait=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drop values that are still on the device, as reading them may fail. Do not wait for other ranks."""
        self.stop_watching()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the values that are not yet logged, and release all tensors."""
        self.stop_watching(patience_s=PATIENCE_S)

    def stop_watching(self, *, patience_s: float = 0.0) -> None:
        """Write the values that arrive within `patience_s` seconds per curve. Then release all tensors. Idempotent."""
        self._train.finish(patience_s=patience_s)
        self._val.finish(patience_s=patience_s)
