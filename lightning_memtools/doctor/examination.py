"""An examination: passes the events of a training to the checks, and collects what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools.doctor.check_registry import made_checks
from lightning_memtools.doctor.findings import DoctorReport, Finding
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.error_frames import in_one_line


class Examination:
    """Watches the first steps of a training and of evaluation; call the method of each event when it happens.

    Events of training after the last watched step, and of evaluation after as many batches, do nothing.

    A check that fails itself is left out from then on and reported as information; the others go on.

    Args:
        case: The training.
        names: The names of the checks.
    """

    def __init__(self, case: TrainingCase, names: Sequence[str]) -> None:
        self.case = case
        self.names = tuple(names)
        self.findings: list[Finding] = []
        self.n_steps = 0
        self.n_evaluated = 0
        self.is_concluded = False
        self._checks = made_checks(case, names)

    def report(self) -> DoctorReport:
        """Return what was found so far."""
        return DoctorReport.of(self.findings, self.names, self.n_steps)

    def before_loading(self) -> None:
        """A checkpoint is about to be loaded."""
        self._tell("before_loading")

    def loading(self, state: Mapping[str, Tensor]) -> None:
        """A state_dict is being loaded."""
        self._tell("loading", state)

    def before_training(self) -> None:
        """Model and optimizers are ready, on their device."""
        self._tell("before_training")

    def batch_start(self, batch: Any) -> None:
        """A training batch is on the device."""
        self._tell_in_training("batch_start", batch, self.n_steps)
        self.case.trial = None  # its error holds the step's frames

    def before_backward(self, loss: Any) -> None:
        """The forward pass is over."""
        self._tell_in_training("before_backward", loss)

    def after_backward(self) -> None:
        """Gradients were computed."""
        self._tell_in_training("after_backward")

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        self._tell_in_training("before_optimizer_step", optimizer)

    def batch_end(self, batch: Any) -> None:
        """A training batch is over; the last watched one ends the examination of training."""
        self._tell("batch_end", batch, self.n_steps)
        self.n_steps += 1
        if self.n_steps >= self.case.steps:
            self.conclude()

    def evaluation_batch_start(self) -> None:
        """An evaluation batch begins."""
        if self.n_evaluated < self.case.steps:
            self._tell("evaluation_batch_start")

    def evaluation_batch_end(self, outputs: Any) -> None:
        """An evaluation batch is over."""
        if self.n_evaluated < self.case.steps:
            self.n_evaluated += 1
            self._tell("evaluation_batch_end", outputs)

    def evaluation_end(self) -> None:
        """An evaluation within training is over."""
        self._tell("evaluation_end")

    def conclude(self) -> None:
        """End the watch over training steps. Idempotent."""
        if not self.is_concluded:
            self.is_concluded = True
            self._tell("conclude")

    def _tell_in_training(self, event: str, *arguments: Any) -> None:
        if not self.is_concluded:
            self._tell(event, *arguments)

    def _tell(self, event: str, *arguments: Any) -> None:
        for name, check in list(self._checks):
            method: Callable[..., Iterable[Finding]] | None = getattr(check, event, None)
            if method is None:
                continue
            try:
                self.findings += list(method(*arguments))
            except Exception as error:  # noqa: BLE001, a check must not end the user's training
                self._checks.remove((name, check))
                self.findings.append(_failed(name, error))


def _failed(name: str, error: Exception) -> Finding:
    return Finding(
        name,
        "info",
        "the check itself",
        f"It raised {in_one_line(error)}",
        "It was left out; the other checks went on.",
        f"Leave it out with ignore=[{name!r}] if this returns.",
    )
