"""An examination: the checks by name, and the events of a training that are passed to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_memtools.doctor import graph_checks, loader_checks, model_checks
from lightning_memtools.doctor.findings import DoctorReport, Finding
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.first_time import FirstTime

Event = Literal[
    "start",  # model, optimizers and loaders are ready
    "batch_start",  # with the batch, on the device
    "loss",  # with the loss of a backward pass that follows
    "gradients",  # backward is over
    "update",  # with the optimizer, which is about to step
    "batch_end",
    "end",  # the last watched batch is over
]

# The check's name, the event, or "first " and the event, and a function of the case and of what comes with the event.
# It returns findings; one that only notes what others need returns nothing.
CHECKS: tuple[tuple[str, str, Callable[[TrainingCase, Any], list[Finding] | None]], ...] = (
    ("batch_norm_one_sample", "first loss", loader_checks.batch_norm_one_sample),
    ("shared_memory", "start", loader_checks.note_free_memory),
    ("shared_memory", "first batch_start", loader_checks.shared_memory),
    ("optimizer_parameters", "end", model_checks.optimizer_parameters),
    ("symmetric_weights", "first gradients", model_checks.symmetric_weights),
    ("devices", "start", model_checks.devices),
    ("reproducibility", "start", model_checks.reproducibility),
    ("scheduler_interval", "start", loader_checks.scheduler_interval),
    ("missing_gradients", "update", model_checks.note_update),
    ("missing_gradients", "end", model_checks.missing_gradients),
    ("retained_graphs", "loss", graph_checks.mark_graph),
    ("retained_graphs", "batch_end", graph_checks.retained_graphs),
    ("loss_broadcast", "first loss", graph_checks.loss_broadcast),
    ("loss_sum", "first loss", graph_checks.note_sums),
    ("loss_sum", "first batch_end", graph_checks.loss_sum),
    ("frozen_batch_norm", "start", model_checks.note_frozen_norms),
    ("frozen_batch_norm", "end", model_checks.frozen_norms),
)
# Of these, the findings come from `diagnose`, which loads the checkpoint and runs the evaluation.
ONLY_IN_DIAGNOSE = ("checkpoint_keys", "evaluation_graphs")
NAMES = (*ONLY_IN_DIAGNOSE, *dict.fromkeys(name for name, _, _ in CHECKS))


def selected_checks(checks: str | Sequence[str], ignore: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the selected checks, in the order in which they run.

    Args:
        checks: "all", one name, or several.
        ignore: The names of checks to leave out.

    Raises:
        ValueError: The name of a check is unknown.
    """
    wanted = NAMES if checks == "all" else [checks] if isinstance(checks, str) else checks
    ignored = [ignore] if isinstance(ignore, str) else ignore
    for name in (*wanted, *ignored):
        if name not in NAMES:
            raise ValueError(f"There is no check {name!r}. The checks are: {', '.join(NAMES)}; or 'all'.")
    return tuple(name for name in NAMES if name in wanted and name not in ignored)


class Examination:
    """Runs the checks during the first training steps.

    A check's function is not called again once it has raised or has returned findings.

    Args:
        case: The objects and settings of the training.
        names: The names of the checks.
        steps: The number of training batches to watch.

    Attributes:
        findings: The findings so far.
        failures: Messages of the errors that checks raised, each with the check's name.
        is_concluded: True once the training steps have been watched.
    """

    def __init__(self, case: TrainingCase, names: Sequence[str], steps: int) -> None:
        self.case = case
        self.names = tuple(names)
        self.findings: list[Finding] = []
        self.failures: list[str] = []
        self.is_concluded = False
        self._steps = steps
        self._active = [check for check in CHECKS if check[0] in names]
        self._noting_lines: torch.autograd.set_detect_anomaly | None = None
        self._is_first = FirstTime()

    def report(self) -> DoctorReport:
        """Return a report of the findings so far."""
        return DoctorReport.of(self.findings, self.names, self.case.n_steps)

    def tell(self, event: Event, argument: Any = None) -> None:
        """Pass an event and its argument, such as the loss, to the checks. Do nothing after the last watched batch."""
        self.stop()
        if self.is_concluded:
            return
        if event == "loss" and not (isinstance(argument, Tensor) and argument.grad_fn is not None):
            return
        if event == "batch_start" and not self.case.n_steps:
            loader_checks.note_shapes(self.case, argument)
        if self._is_first(event):
            self._call(f"first {event}", argument)
        self._call(event, argument)
        self.is_concluded |= event == "end"
        if event == "batch_start" and not self.case.n_steps and {"loss_broadcast", "loss_sum"} & set(self.names):
            # Anomaly mode notes the stack of each operation. It checks for NaN only if it did so before.
            checks_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
            self._noting_lines = torch.autograd.set_detect_anomaly(mode=True, check_nan=checks_nan)
        if event == "batch_end":
            self.case.n_steps += 1
            if self.case.n_steps >= self._steps:
                self.tell("end")

    def stop(self) -> None:
        """Undo the change that the first step makes to autograd's anomaly mode. Idempotent."""
        if self._noting_lines is not None:
            self._noting_lines.__exit__()
        self._noting_lines = None

    def _call(self, event: str, argument: Any) -> None:
        for check in [check for check in self._active if check[1] == event]:
            name, _, function = check
            try:
                findings = function(self.case, argument)
            except Exception as error:  # noqa: BLE001, a check must not end the user's training
                self.failures.append(f"{name} ({in_one_line(error)})")
                self._active.remove(check)
            else:
                if findings:
                    self.findings += findings
                    self._active.remove(check)
