"""TrainingDoctor: finds the classic training mistakes before or in the first steps of training."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memtools._lightning import is_compiled_by_lightning, training_step
from lightning_memtools.doctor.check_registry import selected_checks
from lightning_memtools.doctor.examination import Examination
from lightning_memtools.doctor.findings import DoctorReport, Finding, TrainingMistakeError
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import NO_RUN, NotWritten, report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.reporting.tables import console_table
from lightning_memtools.simulation.trainer_stand_in import forward_of


class TrainingDoctor(Callback):
    """Finds classic training mistakes in the real model, data and first steps, each with a measurement and a fix.

    Before training it looks at parameters, optimizers, devices, settings and the checkpoint to be loaded. At the first
    batch it runs the step once on fake tensors. Then it watches the first `steps` training batches and evaluation
    batches, reports, and does nothing from then on. Training takes the same course, bit for bit, with and without it.

    The report is printed where something serious was found, written to `<log_dir>/memtools/doctor.md` and
    `doctor.json`, and logged as text `memtools/doctor`. It is also the attribute `report`. With several ranks it holds
    the findings of all.

    In a step nothing waits for the device, except where a check says so: the host waits twice at the start, and once at
    the last watched step.

    Args:
        checks: "all", or the names of the checks to make.
        steps: The number of training batches to watch, and of evaluation batches.
        on_finding: "warn" prints serious findings and warns; "raise" ends training with TrainingMistakeError, on every
            rank.
        ignore: The names of checks to leave out.

    Raises:
        ValueError: A check's name is unknown, `steps` is below 1, or `on_finding` is neither of the two.
    """

    takes_part_in_trials = False
    """BatchSizeTuner's trials leave this callback out."""

    def __init__(
        self,
        *,
        checks: str | Sequence[str] = "all",
        steps: int = 20,
        on_finding: Literal["warn", "raise"] = "warn",
        ignore: Sequence[str] = (),
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps} watches nothing. Give a number of training steps from 1 upwards.")
        if on_finding not in {"warn", "raise"}:
            raise ValueError(f"on_finding={on_finding!r} is neither 'warn' nor 'raise'.")
        self._names = selected_checks(checks, ignore)
        self.checks = checks
        self.steps = steps
        self.on_finding = on_finding
        self.ignore = ignore
        self.report = DoctorReport(checks=self._names)
        self._examination: Examination | None = None
        self._ranks: RankGather | None = None
        self._directory: Path | NotWritten = NO_RUN
        self._n_reported = 0
        self._told: set[Finding] = set()
        self._load_hook: RemovableHandle | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Be ready to compare the keys of a checkpoint that is loaded."""
        self._stop()
        if stage != "fit":
            return
        self._directory = report_directory(trainer)
        self._ranks = RankGather()
        self._told = set()
        self._examination = Examination(
            TrainingCase(
                model=pl_module,
                steps=self.steps,
                others=[*trainer.callbacks, trainer.datamodule],  # type: ignore[attr-defined]
                stop_at=trainer,
                precision=str(trainer.precision),
                clip=trainer.gradient_clip_val,
                world_size=trainer.world_size,
                local_ranks=min(trainer.num_devices, trainer.world_size),
                sharded=why_unsupported(type(self).__name__, type(trainer.strategy)) is not None,
                seeded="PL_GLOBAL_SEED" in os.environ,
            ),
            self._names,
        )
        if pl_module.strict_loading and not self._examination.case.sharded:
            # The path given to `fit` is not known here, but what is loaded from it comes by this hook.
            self._load_hook = pl_module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda _module, state, *_rest: self._compare_keys(trainer, state)
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at what is there before the first step."""
        self._remove_load_hook()
        examination = self._watching()
        if examination is None:
            return
        case = examination.case
        case.optimizers = trainer.optimizers
        case.device = trainer.strategy.root_device
        case.train_loader = trainer.train_dataloader
        validation = trainer.val_dataloaders
        case.evaluation_loaders = validation if isinstance(validation, (list, tuple)) else [validation]
        n_batches = trainer.num_training_batches
        case.n_train_batches = int(n_batches) if n_batches != float("inf") else None
        # One rank cannot trace a step that needs the others, and a compiled one cannot be traced.
        if not case.sharded and not is_compiled_by_lightning(pl_module):
            case.forward = forward_of(trainer, pl_module, 0)
        examination.before_training()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the state of the batch; the first one goes through a trial on fake tensors."""
        examination = self._watching()
        if examination is not None:
            examination.batch_start(batch)
            if examination.n_steps == 0:
                self._tell(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Mark the step's graph."""
        examination = self._watching()
        if examination is not None:
            examination.before_backward(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at which parameters have gradients."""
        examination = self._watching()
        if examination is not None:
            examination.after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Look at the gradients."""
        examination = self._watching()
        if examination is not None:
            examination.before_optimizer_step(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step; the last watched one brings the report."""
        examination = self._watching()
        if examination is not None:
            examination.batch_end(batch)
            if not examination.watches_training and (self._tell(trainer) or not trainer.enable_validation):
                self._stop()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note the state of BatchNorm."""
        if self._examination is not None and self._examination.watches_evaluation:
            self._examination.evaluation_batch_start()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look at what the step returned."""
        if self._examination is not None and self._examination.watches_evaluation:
            self._examination.evaluation_batch_end(outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the time of evaluation out, and stop when nothing is left to watch."""
        examination = self._examination
        if examination is None:
            return
        examination.evaluation_end()
        if not examination.watches_training:
            self._tell(trainer)
            self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a training that is shorter than the steps to watch."""
        if self._examination is not None:
            self._examination.conclude()
            self._tell(trainer)
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say what was found until then on this rank: the others may have ended."""
        examination = self._examination
        if examination is not None and not isinstance(exception, TrainingMistakeError):
            self.report = examination.report()
            self._publish(trainer, [one for one in self.report.serious if one not in self._told])
        self._stop()

    def _compare_keys(self, trainer: Trainer, state: Mapping[str, Tensor]) -> None:
        self._remove_load_hook()  # the comparison loads too, into fake tensors
        if self._examination is not None:
            self._examination.loading(state)
            self._tell(trainer)

    def _remove_load_hook(self) -> None:
        if self._load_hook is not None:
            self._load_hook.remove()
        self._load_hook = None

    def _watching(self) -> Examination | None:
        examination = self._examination
        return examination if examination is not None and examination.watches_training else None

    def _tell(self, trainer: Trainer) -> bool:
        """Collect the findings of all ranks and tell of those that are new. Called at the same points on every rank.

        Returns:
            True if every rank has watched an evaluation.
        """
        if self._examination is None or self._ranks is None:
            return True
        mine = self._examination.report()
        every = self._ranks.objects((mine.findings, self._examination.n_evaluated))
        found = [finding for findings, _ in every for finding in findings]
        self.report = DoctorReport.of(found, mine.checks, mine.steps)
        new = [finding for finding in self.report.serious if finding not in self._told]
        self._told.update(new)
        if self._examination.is_concluded or new:
            self._publish(trainer, new)
        if new and self.on_finding == "raise":
            raise TrainingMistakeError(self.report)
        return all(n_evaluated for _, n_evaluated in every)

    def _publish(self, trainer: Trainer, new: Sequence[Finding]) -> None:
        if not trainer.is_global_zero:
            return
        text = self.report.markdown()
        write_report_or_warn(self._directory, "doctor.md", text)
        write_report_or_warn(self._directory, "doctor.json", self.report.as_json())
        self._n_reported = max(self._n_reported + 1, training_step(trainer))
        log_text(trainer, "memtools/doctor", text, self._n_reported)
        if new and self.on_finding == "warn":
            names = ", ".join(dict.fromkeys(finding.check for finding in new))
            print_on_console(console_table(self.report.table(new)))
            warnings.warn(f"TrainingDoctor found {len(new)} serious mistake(s): {names}. See the table.", stacklevel=2)

    def _stop(self) -> None:
        self._remove_load_hook()
        self._examination = None
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None
