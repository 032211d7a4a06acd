"""TrainingDoctor: finds the classic training mistakes before or in the first steps of training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._lightning import training_step
from lightning_memtools.callbacks.guarded import WatchingCallback
from lightning_memtools.doctor.examination import ONLY_IN_DIAGNOSE, Event, Examination, selected_checks
from lightning_memtools.doctor.findings import DoctorReport, Finding, TrainingMistakeError
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import NO_RUN, NotWritten, report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.phrases import counted
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.reporting.tables import console_table
from lightning_memtools.warning_categories import DegradedWarning, FindingWarning


class TrainingDoctor(WatchingCallback):
    """Finds classic mistakes in the model, the data and the first training steps, and suggests a fix for each.

    It watches the first `steps` training batches, reports, and does nothing from then on.
    Training runs the same, bit for bit, with and without it.

    The report is printed if something serious was found, and written to `<log_dir>/memtools/doctor.md` and
    `doctor.json`. It is also in the attribute `report`. With several ranks, the report has the findings of all ranks.

    | logged | when |
    | --- | --- |
    | `memtools/doctor` (text) | after the last watched step, or earlier if a finding is serious |
    | `memory/leaks` | with each report: the number of findings of the check `retained_graphs` |

    The host waits for the device in the first step and at the last watched one, and nowhere else.

    Args:
        checks: "all", or the names of the checks to make.
        steps: The number of training batches to watch.
        on_finding: "warn" prints serious findings and warns; "raise" ends training with TrainingMistakeError, on every
            rank.
        ignore: The names of checks to leave out.

    Raises:
        ValueError: A check's name is unknown, `steps` is below 1, or `on_finding` is neither "warn" nor "raise".
    """

    parts_of_a_run = ("_examination", "_ranks")
    takes_part_in_trials = False
    documented = (TrainingMistakeError,)
    page = "training-doctor"

    def __init__(
        self,
        *,
        checks: str | Sequence[str] = "all",
        steps: int = 20,
        on_finding: Literal["warn", "raise"] = "warn",
        ignore: Sequence[str] = (),
    ) -> None:
        if not is_count(steps):
            raise ValueError(f"steps={steps!r} watches nothing. Give a number of training steps from 1 upwards.")
        if on_finding not in {"warn", "raise"}:
            raise ValueError(f"on_finding={on_finding!r} is neither 'warn' nor 'raise'.")
        self._names = tuple(name for name in selected_checks(checks, ignore) if name not in ONLY_IN_DIAGNOSE)
        self.checks = checks
        self.steps = steps
        self.on_finding = on_finding
        self.ignore = ignore
        self.report = DoctorReport(checks=self._names)
        self._examination: Examination | None = None
        self._ranks: RankGather
        self._directory: Path | NotWritten = NO_RUN
        self._told: set[Finding] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a new report, and run the checks that do not need a training step."""
        self.stop_watching()
        n_batches = trainer.num_training_batches
        if trainer.max_steps >= 0:  # they may end before an epoch does
            n_batches = min(n_batches, trainer.max_steps * trainer.accumulate_grad_batches)
        case = TrainingCase(
            model=pl_module,
            optimizers=trainer.optimizers,
            train_loader=trainer.train_dataloader,
            n_train_batches=None if n_batches == float("inf") else int(n_batches),
            device=trainer.strategy.root_device,
            world_size=trainer.world_size,
            local_ranks=min(trainer.num_devices, trainer.world_size),
            sharded=why_unsupported("TrainingDoctor", type(trainer.strategy)) is not None,
            others=[*trainer.callbacks, trainer.datamodule],  # type: ignore[attr-defined]
            stop_at=trainer,
        )
        if pl_module.automatic_optimization and trainer.max_epochs is not None:
            n_updates, n_epochs = trainer.estimated_stepping_batches, trainer.max_epochs
            for one in trainer.lr_scheduler_configs:
                mine, others = (n_updates, n_epochs) if one.interval == "step" else (n_epochs, n_updates)
                case.schedulers.append((one.scheduler, one.interval, mine / one.frequency, others))
        self._ranks = RankGather()  # through the store: a rank that failed is not waited for
        self._directory, self.report = report_directory(trainer), DoctorReport(checks=self._names)
        self._examination, self._told = Examination(case, self._names, self.steps), set()
        self._examination.tell("start")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Pass the batch to the checks."""
        self._tell(trainer, "batch_start", batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Pass the loss to the checks, which examine its autograd graph."""
        self._tell(trainer, "loss", loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the checks see which parameters have gradients."""
        self._tell(trainer, "gradients")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Let the checks read the gradients before the update."""
        self._tell(trainer, "update", optimizer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Tell the checks that the training step has ended."""
        self._tell(trainer, "batch_end")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the findings if training ended before all steps were watched."""
        self._tell(trainer, "end")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        self.stop_watching()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report the findings so far, of this rank only."""
        if self._examination is not None and not isinstance(exception, TrainingMistakeError):
            self._examination.tell("end")
            self._ranks.close()  # other ranks may not answer
            self._publish(trainer, self._examination)
        self.stop_watching()

    def stop_watching(self) -> None:
        """Stop watching. Idempotent."""
        if self._examination is not None:
            self._examination.stop()
            self._ranks.close()
        self._examination = None

    def _tell(self, trainer: Trainer, event: Event, argument: Any = None) -> None:
        """Pass the event of a hook to the checks. Report after the first step, and after the last one watched."""
        examination = self._examination
        if examination is None:
            return
        examination.case.accumulate = trainer.accumulate_grad_batches  # a schedule sets it when an epoch starts
        examination.tell(event, argument)
        # The same points on every rank, which wait for each other here.
        if examination.is_concluded or (event == "batch_end" and examination.case.n_steps == 1):
            new = self._publish(trainer, examination)
            if new and self.on_finding == "raise":
                raise TrainingMistakeError(self.report)
        if examination.is_concluded:
            self.stop_watching()

    def _publish(self, trainer: Trainer, examination: Examination) -> list[Finding]:
        """Collect the findings of all ranks, write and log the report, and return the serious findings that are new."""
        every = self._ranks.objects(examination.findings)
        findings = [one for theirs in every for one in theirs]
        self.report = DoctorReport.of(findings, self._names, examination.case.n_steps)
        new = [finding for finding in self.report.serious if finding not in self._told]
        self._told.update(new)
        failures, examination.failures = examination.failures, []
        if failures:
            text = f"TrainingDoctor leaves out checks that failed: {'; '.join(failures)}."
            warnings.warn(text, DegradedWarning, stacklevel=2)
        if not trainer.is_global_zero or not (new or examination.is_concluded):
            return new
        text = self.report.markdown()
        write_report_or_warn(self._directory, "doctor.md", text)
        write_report_or_warn(self._directory, "doctor.json", self.report.as_json())
        log_text(trainer, "memtools/doctor", text, training_step(trainer))
        n_leaks = sum(finding.check == "retained_graphs" for finding in new)
        if n_leaks:
            log_scalars(trainer, {"memory/leaks": float(n_leaks)}, training_step(trainer))
        if new and self.on_finding == "warn":
            names = ", ".join(dict.fromkeys(finding.check for finding in new))
            print_on_console(console_table(DoctorReport(tuple(new)).table()))
            number = counted(len(new), "serious mistake", "serious mistakes")
            warnings.warn(f"TrainingDoctor found {number}: {names}. See the table.", FindingWarning, stacklevel=2)
        return new
