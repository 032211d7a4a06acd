"""One fit under TrainingDoctor: its examination, the findings of all ranks, and where they are reported."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import training_step
from lightning_memtools.doctor.examination import Event, Examination
from lightning_memtools.doctor.findings import DoctorReport, Finding, TrainingMistakeError
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.phrases import counted
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.reporting.tables import console_table
from lightning_memtools.warning_categories import DegradedWarning, FindingWarning


class DoctorRun:
    """Runs TrainingDoctor's checks during one fit and reports their findings. Create it on every rank.

    Args:
        trainer: The Trainer.
        module: The module that is trained.
        names: The names of the checks.
        steps: The number of training batches to watch.
        raises: Whether a serious finding ends training instead of giving a warning.

    Attributes:
        report: The findings so far.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, names: Sequence[str], *, steps: int, raises: bool
    ) -> None:
        self.report = DoctorReport(checks=tuple(names))
        case = TrainingCase(
            model=module,
            world_size=trainer.world_size,
            local_ranks=min(trainer.num_devices, trainer.world_size),
            sharded=why_unsupported("TrainingDoctor", type(trainer.strategy)) is not None,
            others=[*trainer.callbacks, trainer.datamodule],  # type: ignore[attr-defined]
            stop_at=trainer,
        )
        self._examination = Examination(case, names, steps)
        self._raises = raises
        self._ranks = RankGather()  # through the store: a rank that failed is not waited for
        self._directory = report_directory(trainer)
        self._told: set[Finding] = set()

    def begin(self, trainer: Trainer) -> None:
        """Examine the model, its loaders and its settings before the first step."""
        case, n_batches = self._examination.case, trainer.num_training_batches
        case.device = trainer.strategy.root_device
        case.train_loader, case.optimizers = trainer.train_dataloader, trainer.optimizers
        if trainer.max_steps >= 0:  # they may end before an epoch does
            n_batches = min(n_batches, trainer.max_steps * trainer.accumulate_grad_batches)
        case.n_train_batches = None if n_batches == float("inf") else int(n_batches)
        if trainer.lightning_module.automatic_optimization and trainer.max_epochs is not None:
            n_updates, n_epochs = trainer.estimated_stepping_batches, trainer.max_epochs
            for one in trainer.lr_scheduler_configs:
                mine, others = (n_updates, n_epochs) if one.interval == "step" else (n_epochs, n_updates)
                case.schedulers.append((one.scheduler, one.interval, mine / one.frequency, others))
        self._examination.tell("start")

    def tell(self, trainer: Trainer, event: Event, argument: Any = None) -> bool:
        """Pass the event of a Lightning hook, and its argument such as the loss, to the checks.

        Report after the first step and after the last watched step. Return True if nothing is left to watch.
        """
        examination = self._examination
        examination.case.accumulate = trainer.accumulate_grad_batches  # a schedule sets it when an epoch starts
        was_concluded = examination.is_concluded
        examination.tell(event, argument)
        # The same points on every rank, which wait for each other here.
        has_ended = examination.is_concluded and not was_concluded
        if has_ended or (event == "batch_end" and examination.case.n_steps == 1):
            self.publish(trainer)
        return has_ended

    def publish(self, trainer: Trainer) -> None:
        """Collect the findings of all ranks and report the new ones. Called at the same points on every rank.

        Raises:
            TrainingMistakeError: There is a new serious finding, and `raises` is set.
        """
        mine = self._examination.report()
        every = self._ranks.objects(mine.findings)
        self.report = DoctorReport.of([one for findings in every for one in findings], mine.checks, mine.steps)
        new = self._write(trainer)
        if new and self._raises:
            raise TrainingMistakeError(self.report)

    def publish_own(self, trainer: Trainer) -> DoctorReport:
        """Report only this rank's findings. Called when training has failed and other ranks may not answer."""
        self._examination.tell("end")
        self.report = self._examination.report()
        self._write(trainer)
        return self.report

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._examination.stop()
        self._ranks.close()

    def _write(self, trainer: Trainer) -> list[Finding]:
        """Write the report to its files, the loggers and the console, and return the serious findings that are new."""
        new = [finding for finding in self.report.serious if finding not in self._told]
        self._told.update(new)
        failures, self._examination.failures = self._examination.failures, []
        if failures:
            warnings.warn(
                f"TrainingDoctor leaves out checks that failed: {'; '.join(failures)}.", DegradedWarning, stacklevel=2
            )
        if not trainer.is_global_zero or not (new or self._examination.is_concluded):
            return new
        text = self.report.markdown()
        write_report_or_warn(self._directory, "doctor.md", text)
        write_report_or_warn(self._directory, "doctor.json", self.report.as_json())
        log_text(trainer, "memtools/doctor", text, training_step(trainer))
        n_leaks = sum(finding.check == "retained_graphs" for finding in new)
        if n_leaks:
            log_scalars(trainer, {"memory/leaks": float(n_leaks)}, training_step(trainer))
        if new and not self._raises:
            names = ", ".join(dict.fromkeys(finding.check for finding in new))
            print_on_console(console_table(DoctorReport(tuple(new)).table()))
            number = counted(len(new), "serious mistake", "serious mistakes")
            warnings.warn(f"TrainingDoctor found {number}: {names}. See the table.", FindingWarning, stacklevel=2)
        return new
