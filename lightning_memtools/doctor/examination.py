"""An examination: the checks by name, and the passing of a training's events to them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools.doctor.checkpoint_checks import CheckpointKeys
from lightning_memtools.doctor.findings import DoctorReport, Finding
from lightning_memtools.doctor.loader_checks import BatchNormOneSample, ChangedBatch, DataWaiting, SharedMemory
from lightning_memtools.doctor.loss_checks import SpikeCheck, StepTrial
from lightning_memtools.doctor.memory_checks import EvaluationGraphs, GrowingMemory, RetainedGraphs
from lightning_memtools.doctor.module_checks import Devices, ModuleModes
from lightning_memtools.doctor.parameter_checks import MissingGradients, OptimizerParameters, SymmetricWeights
from lightning_memtools.doctor.settings_checks import RejectedSettings, Reproducibility
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.error_frames import in_one_line

# A check has methods named as the events of `Examination`, and yields findings from them. None: it is made by the
# trial of the step, which several checks share.
CHECKS: Mapping[str, Callable[[TrainingCase], Any] | None] = {
    "batch_norm_one_sample": BatchNormOneSample,
    "shared_memory": SharedMemory,
    "checkpoint_keys": CheckpointKeys,
    "optimizer_parameters": OptimizerParameters,
    "symmetric_weights": SymmetricWeights,
    "devices": Devices,
    "rejected_settings": RejectedSettings,
    "reproducibility": Reproducibility,
    "missing_gradients": MissingGradients,
    "retained_graphs": RetainedGraphs,
    "evaluation_graphs": EvaluationGraphs,
    "loss_broadcast": None,
    "loss_sum": None,
    "module_modes": ModuleModes,
    "changed_batch": ChangedBatch,
    "data_waiting": DataWaiting,
    "memory_growth": GrowingMemory,
    "loss_spikes": SpikeCheck,
}
_BY_TRIAL = {"loss_broadcast", "loss_sum", "devices"}


def selected_checks(checks: str | Sequence[str], ignore: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the checks to make, in their order.

    Args:
        checks: "all", one name, or several.
        ignore: The names of those to leave out.

    Raises:
        ValueError: There is no check of a name.
    """
    wanted, left_out = (
        list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]
        for given in (list(CHECKS) if checks == "all" else checks, ignore)
    )
    for name in (*wanted, *left_out):
        if not isinstance(name, str) or name not in CHECKS:
            near = difflib.get_close_matches(str(name), CHECKS, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"There is no check {name!r}.{meant} The checks are: {', '.join(CHECKS)}; or 'all'.")
    return tuple(name for name in CHECKS if name in wanted and name not in left_out)


def made_checks(case: TrainingCase, names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the checks of these names with their names; the trial comes last, under the name "trial"."""
    made = [(name, make(case)) for name, make in CHECKS.items() if name in names and make is not None]
    if _BY_TRIAL & set(names):
        made.append(("trial", StepTrial(case, names)))
    return made


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
