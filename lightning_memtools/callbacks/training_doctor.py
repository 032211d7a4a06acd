"""TrainingDoctor: finds the classic training mistakes before or in the first steps of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._lightning import EitherCallback, EvaluationBatchEnd
from lightning_memtools.callbacks.doctor_run import DoctorRun
from lightning_memtools.doctor.examination import Examination, selected_checks
from lightning_memtools.doctor.findings import DoctorReport
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.reporting.neighbours import Neighbour


class TrainingDoctor(EitherCallback, Neighbour):
    """Finds classic training mistakes in the real model, data and first steps, each with a measurement and a fix.

    Before training it looks at parameters, optimizers, devices, settings and the checkpoint to be loaded. At the first
    batch it runs the step once on fake tensors. Then it watches the first `steps` training batches and evaluation
    batches, reports, and does nothing from then on. Training takes the same course, bit for bit, with and without it.

    The report is printed where something serious was found, and written to `<log_dir>/memtools/doctor.md` and
    `doctor.json`. It is also the attribute `report`. With several ranks it holds the findings of all.

    | logged | when |
    | --- | --- |
    | `memtools/doctor` (text) | the findings, after the last step that it watches; before, if one is serious |
    | `memory/leaks` | the number of serious findings of `memory_growth` and `retained_graphs`, when they are reported |

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

    parts_of_a_run = ("_run",)
    takes_part_in_trials = False

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
        self._names = selected_checks(checks, ignore)
        self.checks = checks
        self.steps = steps
        self.on_finding = on_finding
        self.ignore = ignore
        self._run: DoctorRun | None = None

    @property
    def report(self) -> DoctorReport:
        """The findings of all ranks so far, in the latest fit."""
        return DoctorReport(checks=self._names) if self._run is None else self._run.report

    @property
    def _examination(self) -> Examination | None:
        return None if self._run is None else self._run.examination

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Be ready to compare the keys of a checkpoint that is loaded."""
        self._stop()
        if stage == "fit":
            raises = self.on_finding == "raise"
            self._run = DoctorRun(trainer, pl_module, self._names, steps=self.steps, raises=raises)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the checks that need no step."""
        if self._run is not None:
            self._run.begin(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the state of the batch; the first one goes through a trial on fake tensors."""
        if self._run is not None and self._examination is not None:
            self._examination.batch_start(batch)
            if self._examination.n_steps == 0:
                self._run.tell(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Mark the step's graph."""
        if self._examination is not None:
            self._examination.before_backward(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at which parameters have gradients."""
        if self._examination is not None:
            self._examination.after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Look at the gradients."""
        if self._examination is not None:
            self._examination.before_optimizer_step(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step; after the last watched one, report."""
        examination = self._examination
        if self._run is None or examination is None or examination.is_concluded:
            return
        examination.batch_end(batch)
        if examination.is_concluded and (self._run.tell(trainer) or not trainer.enable_validation):
            self._stop()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note the state of BatchNorm."""
        if self._examination is not None:
            self._examination.evaluation_batch_start()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Check what the step returned."""
        if self._examination is not None:
            self._examination.evaluation_batch_end(EvaluationBatchEnd(*args, **kwargs).outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the time of evaluation out, and stop when nothing is left to watch."""
        if self._run is not None and self._examination is not None:
            self._examination.evaluation_end()
            if self._examination.is_concluded:
                self._run.tell(trainer)
                self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a training that is shorter than the steps to watch."""
        if self._run is not None and self._examination is not None:
            self._examination.conclude()
            self._run.tell(trainer)
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report what this rank has found so far."""
        if self._run is not None:
            self._run.end_with(trainer, exception)

    def _stop(self) -> None:
        if self._run is not None:
            self._run.stop()
