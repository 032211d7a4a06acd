"""TrainingDoctor: finds the classic training mistakes before or in the first steps of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools.callbacks.doctor_run import DoctorRun
from lightning_memtools.callbacks.guarded import WatchingCallback
from lightning_memtools.doctor.examination import ONLY_IN_DIAGNOSE, Event, selected_checks
from lightning_memtools.doctor.findings import DoctorReport, TrainingMistakeError
from lightning_memtools.memory.sizes import is_count


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

    parts_of_a_run = ("_run",)
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
        self._run: DoctorRun | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start a new report."""
        self.stop_watching()
        if stage == "fit":
            self.report = DoctorReport(checks=self._names)
            raises = self.on_finding == "raise"
            self._run = DoctorRun(trainer, pl_module, self._names, steps=self.steps, raises=raises)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the checks that do not need a training step."""
        if self._run is not None:
            self._run.begin(trainer)

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
        self.stop_watching()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        self.stop_watching()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report the findings so far, of this rank only."""
        if self._run is not None and not isinstance(exception, TrainingMistakeError):
            self.report = self._run.publish_own(trainer)
        self.stop_watching()

    def _tell(self, trainer: Trainer, event: Event, argument: Any = None) -> None:
        if self._run is None:
            return
        is_over = self._run.tell(trainer, event, argument)
        self.report = self._run.report
        if is_over:
            self.stop_watching()

    def stop_watching(self) -> None:
        """Stop watching. Idempotent."""
        run, self._run = self._run, None
        if run is not None:
            self.report = run.report
            run.stop()
