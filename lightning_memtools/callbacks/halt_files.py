"""Reads from the Trainer what a halt of HaltOnNaN needs, and writes its files."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import (
    forbid_saving_on_exception,
    gradient_scaler,
    saves_on_exception,
    write_checkpoint,
)
from lightning_memtools.nonfinite.bad_step_rerun import TrainingRun
from lightning_memtools.nonfinite.halt_session import RERUN_TIMEOUT_S, TIMEOUT_S, HaltActions
from lightning_memtools.nonfinite.step_outcome import StepConditions, plain_facts, precision_now
from lightning_memtools.reporting.files import NotWritten, report_directory, write_report_on_rank_zero
from lightning_memtools.reporting.ranks import RankGather


class HaltFiles:
    """The files that HaltOnNaN writes in one call of the Trainer, and the connections to the other ranks.

    Rank 0 writes, every rank learns the path, and none waits for a rank that failed. Make it on every rank.

    Args:
        trainer: The Trainer.
        directory: Where files go instead of `<log_dir>/memtools/`.
        reruns: Whether a bad step is run again, for which other ranks wait longer.
    """

    def __init__(self, trainer: Trainer, directory: str | None, *, reruns: bool) -> None:
        self.ranks = RankGather(timedelta(seconds=TIMEOUT_S))
        self.patient_ranks = RankGather(timedelta(seconds=RERUN_TIMEOUT_S)) if reruns else self.ranks
        self._trainer = trainer
        self._directory = report_directory(trainer, directory)

    def actions(self) -> HaltActions:
        """Return what a halt does outside of the step."""
        directory = self._directory
        return HaltActions(
            saves_on_exception=partial(saves_on_exception, self._trainer),
            forbid_saving=partial(forbid_saving_on_exception, self._trainer),
            save_checkpoint=self._save_checkpoint,
            write_report=self.write_report,
            directory=None if isinstance(directory, NotWritten) else directory,
            no_directory=directory.reason if isinstance(directory, NotWritten) else "",
        )

    def write_report(self, name: str, text: str) -> tuple[Path | None, str]:
        """Write a report; return its path and "", or None and the reason. Call it on every rank."""
        written = write_report_on_rank_zero(self._directory, name, text, self.ranks)
        return (None, written.reason) if isinstance(written, NotWritten) else (written, "")

    def close(self) -> None:
        """Disconnect from the other ranks; closing twice does no harm."""
        self.ranks.close()
        self.patient_ranks.close()

    def _save_checkpoint(self, name: str) -> tuple[Path | None, str]:
        if isinstance(self._directory, NotWritten):
            return None, self._directory.reason
        path, failure = self._directory / name, ""
        try:
            if self.ranks.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self._trainer, path)
        except Exception as error:  # noqa: BLE001, whatever keeps the checkpoint from being written must not hide the halt
            failure = f"could not be written: {type(error).__name__}: {error}"
        failure = self.ranks.objects(failure)[0]
        return (None, failure) if failure else (path, "")


def training_run(trainer: Trainer, pl_module: LightningModule) -> TrainingRun:
    """Return the parts of a training run that are needed to run a step of it again."""
    return TrainingRun(
        module=pl_module,
        optimizers=trainer.optimizers,
        schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
        scaler=gradient_scaler(trainer),
        world_size=trainer.world_size,
        conditions=lambda: _conditions_of(trainer, pl_module),
        trainer=trainer,
    )


def _conditions_of(trainer: Trainer, pl_module: LightningModule) -> StepConditions:
    scaler = gradient_scaler(trainer)
    automatic = pl_module.automatic_optimization
    with trainer.precision_plugin.train_step_context():
        precision = precision_now(pl_module.device.type)
    return StepConditions(
        automatic=automatic,
        divided_by=trainer.accumulate_grad_batches if automatic else 1,
        scale=None if scaler is None else scaler.get_scale(),
        trainer=plain_facts(trainer),
        **precision,
    )
