"""Connects HaltOnNaN's guard to a Trainer: what it needs to know of it, its files and its loggers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from torch.nn.parameter import is_lazy

from lightning_memtools._lightning import (
    LoopMarker,
    changes_gradients,
    forbid_saving_on_exception,
    gradient_scaler,
    guard_saving,
    saves_on_exception,
    training_step,
    values_logged_in_evaluation,
    watch_fetches,
    watch_updates,
    wraps_updates,
    write_checkpoint,
)
from lightning_memtools.memory.nested_tensors import bytes_in
from lightning_memtools.nonfinite.bad_step import StepConditions, plain_facts, precision_now
from lightning_memtools.nonfinite.bad_step_rerun import TrainingRun
from lightning_memtools.nonfinite.evaluation_guard import EvaluationGuard
from lightning_memtools.nonfinite.halt_report import HaltStage
from lightning_memtools.nonfinite.halt_session import (
    RERUN_TIMEOUT_S,
    HaltActions,
    HaltOptions,
    HaltSession,
)
from lightning_memtools.nonfinite.micro_batches import move_to_host
from lightning_memtools.nonfinite.step_guard import StepGuard, gradients_under
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import NotWritten, report_directory, write_report_on_rank_zero
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.ranks import EXCHANGE_LIMIT, RankGather
from lightning_memtools.state.starts import BatchStartRecorder

# Of what parameters, gradients and an Adam optimizer take together (4 times the parameters), the share that older
# batches of an accumulation may hold: half of the 0.5% that all callbacks together may add to the peak.
BATCH_SHARE = 0.0025


class HaltRun:
    """HaltOnNaN in one call of the Trainer.

    Of its files, rank 0 writes, every rank learns the path, and none waits for a rank that failed. Make it on every
    rank.

    Args:
        trainer: The Trainer.
        options: The arguments of HaltOnNaN.

    Attributes:
        evaluation: Checks its evaluation runs.
        session: Guards its training; None as long as there is none.
    """

    def __init__(self, trainer: Trainer, options: HaltOptions) -> None:
        self._trainer, self._options = trainer, options
        self._ranks = RankGather(EXCHANGE_LIMIT)
        self._patient_ranks = RankGather(timedelta(seconds=RERUN_TIMEOUT_S)) if options.reruns else self._ranks
        self._directory = report_directory(trainer, options.directory)
        self._actions = self._made_actions()
        self._undo: list[Callable[[], None]] = []
        self.evaluation = EvaluationGuard(options.check_outputs, self._ranks, self._actions)
        self.session: HaltSession | None = None

    def start_training(self, module: LightningModule) -> None:
        """Start to guard steps and checkpoints."""
        trainer = self._trainer
        n_bytes = bytes_in([p for p in module.parameters() if not is_lazy(p)])
        guard = StepGuard(
            module,
            max_skips=self._options.max_skips,
            amp_patience=self._options.amp_patience,
            gradients=gradients_under(type(trainer.strategy), world_size=trainer.world_size),
            ranks=self._ranks,
            mark_loop=LoopMarker(trainer).mark,
            budget_bytes=int(4 * BATCH_SHARE * n_bytes),
            start=BatchStartRecorder(module).record if self._options.reruns else None,
            move=move_to_host if self._options.reruns else None,
            checks_again=changes_gradients(trainer),
            wraps_updates=wraps_updates(trainer),
            undo_updates=self._options.undo_updates,
        )
        self.session = HaltSession(
            training_run(trainer, module), guard, self._ranks, self._patient_ranks, self._actions, self._options,
            self.evaluation.metrics,
        )  # fmt: skip
        self._undo = [
            guard.close,
            watch_fetches(module, guard.fetch),
            watch_updates(trainer, self.session.before_update),
            guard_saving(trainer, self.session.before_saving),
        ]

    def end_evaluation(self, module: LightningModule, stage: HaltStage) -> None:
        """End an evaluation run; raises if a loss was bad."""
        history = () if self.session is None else self.session.guard.history
        self.evaluation.end(module, values_logged_in_evaluation(self._trainer), stage, history)

    def close(self) -> None:
        """Undo what was switched on, and disconnect from the other ranks. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._ranks.close()
        self._patient_ranks.close()

    def _made_actions(self) -> HaltActions:
        directory = self._directory
        return HaltActions(
            saves_on_exception=partial(saves_on_exception, self._trainer),
            forbid_saving=partial(forbid_saving_on_exception, self._trainer),
            save_checkpoint=self._save_checkpoint,
            write_report=self._write_report,
            step=partial(training_step, self._trainer),
            log_skipped=lambda n, step: log_scalars(self._trainer, {"nonfinite/skipped": float(n)}, step),
            publish=self._publish,
            release_checkpoints=self._release_checkpoints,
            directory=None if isinstance(directory, NotWritten) else directory,
            no_directory=directory.reason if isinstance(directory, NotWritten) else "",
        )

    def _release_checkpoints(self) -> None:
        if self._undo:
            self._undo[-1]()

    def _write_report(self, name: str, text: str) -> tuple[Path | None, str]:
        written = write_report_on_rank_zero(self._directory, name, text, self._ranks)
        return (None, written.reason) if isinstance(written, NotWritten) else (written, "")

    def _publish(self, markdown: str, console: str, step: int) -> None:
        log_text(self._trainer, "memtools/nonfinite_report", markdown, step)
        if console and self._trainer.is_global_zero:
            print_on_console(console, soft_wrap=True)

    def _save_checkpoint(self, name: str) -> tuple[Path | None, str]:
        if isinstance(self._directory, NotWritten):
            return None, self._directory.reason
        path, failure = self._directory / name, ""
        try:
            if self._ranks.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self._trainer, path)
        except Exception as error:  # noqa: BLE001, whatever keeps the checkpoint from being written must not hide the halt
            failure = f"could not be written: {type(error).__name__}: {error}"
        failure = self._ranks.objects(failure)[0]
        return (None, failure) if failure else (path, "")


def training_run(trainer: Trainer, pl_module: LightningModule) -> TrainingRun:
    """Return the parts of a training run that are needed to run a step of it again."""
    return TrainingRun(
        module=pl_module,
        optimizers=trainer.optimizers,
        scaler=gradient_scaler(trainer),
        world_size=trainer.world_size,
        conditions=lambda: _conditions_of(trainer, pl_module),
        trainer=trainer,
    )


def _conditions_of(trainer: Trainer, pl_module: LightningModule) -> StepConditions:
    scaler = gradient_scaler(trainer)
    with trainer.precision_plugin.train_step_context():
        precision = precision_now(pl_module.device.type)
    return StepConditions(
        divided_by=trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1,
        scale=None if scaler is None else scaler.get_scale(),
        trainer=plain_facts(trainer),
        **precision,
    )
