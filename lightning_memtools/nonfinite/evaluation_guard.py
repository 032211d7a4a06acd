"""Checks evaluation runs: ends the call for a loss that is NaN or Inf, and names metrics that are in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module

from lightning_memtools.nonfinite.bad_step import PastStep
from lightning_memtools.nonfinite.diagnosis import bad_state
from lightning_memtools.nonfinite.evaluation_outputs import OutputWatch, bad_metrics, is_loss
from lightning_memtools.nonfinite.halt_report import evaluation_finding
from lightning_memtools.nonfinite.halt_session import HaltActions
from lightning_memtools.nonfinite.nonfinite_error import HaltStage
from lightning_memtools.reporting.ranks import RankGather


class EvaluationGuard:
    """Checks the outputs and metrics of evaluation runs.

    Args:
        checks: What is checked, as HaltOnNaN's `check_outputs`.
        ranks: Gathers from all ranks.
        actions: What is done to files and loggers.

    Attributes:
        metrics: The metrics that were NaN or Inf so far: name to text.
    """

    def __init__(self, checks: bool | Literal["losses"], ranks: RankGather, actions: HaltActions) -> None:
        self.metrics: dict[str, str] = {}
        self._checks, self._ranks, self._actions = checks, ranks, actions
        self._watch: OutputWatch | None = None

    def start(self, *, sanity: bool) -> None:
        """Begin a run. In the sanity check nothing is checked: its metrics, of untrained weights, mean nothing."""
        is_on = bool(self._checks) and not sanity
        self._watch = OutputWatch(only_losses=self._checks == "losses") if is_on else None

    def check(self, outputs: Any, place: str) -> None:
        """Check what a step returned, on the device. `place`: the batch within its data loader."""
        if self._watch is not None:
            self._watch.check(outputs, place)

    def end(
        self, module: Module, logged: Mapping[str, Tensor], stage: HaltStage, history: Sequence[PastStep] = ()
    ) -> None:
        """End a run, and raise NonFiniteError if something was bad that must be finite. Collective.

        Args:
            module: The module; its weights may be the cause.
            logged: The metrics of the run.
            stage: val or test.
            history: The last training steps.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return
        step, metrics = self._actions.step(), bad_metrics(logged)
        mere = [] if self._checks is True else [each for each in metrics if not is_loss(each.name)]
        bad = (*watch.bad_outputs(), *(each for each in metrics if each not in mere))
        gathered = self._ranks.objects((bad, {each.name: f"{each} ({stage}, step {step})" for each in mere}))
        self._note({name: text for _, theirs in gathered for name, text in theirs.items()}, step)
        everyone = [theirs for theirs, _ in gathered]
        if any(everyone):
            finding = evaluation_finding(everyone, stage=stage, step=step, weights=bad_state(module))
            raise self._actions.report(finding, history)

    def _note(self, bad: Mapping[str, str], step: int) -> None:
        """Name metrics in a report, each the first time. Collective."""
        if bad.keys() <= self.metrics.keys():
            return
        self.metrics.update({name: text for name, text in bad.items() if name not in self.metrics})
        text = (
            f"Metrics that were not finite in evaluation, at first: {'; '.join(self.metrics.values())}.\nTraining "
            "goes on: a metric may rightly be NaN or Inf. Where it may not, use HaltOnNaN(check_outputs=True).\n"
        )
        self._actions.write_report("nonfinite-metrics-report.md", text)
        self._actions.publish(text, "", step)
