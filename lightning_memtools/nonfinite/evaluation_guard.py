"""Checks evaluation runs: ends the call for a loss that is NaN or Inf, and names metrics that are in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from lightning_memtools.memory.nested_tensors import named_tensors
from lightning_memtools.nonfinite.bad_step import PastStep
from lightning_memtools.nonfinite.diagnosis import bad_state
from lightning_memtools.nonfinite.finite_checks import floats_of, norms_of
from lightning_memtools.nonfinite.halt_report import BadOutput, HaltStage, NonFiniteError, evaluation_error
from lightning_memtools.reporting.loss_names import likely_losses
from lightning_memtools.reporting.ranks import RankGather

_NEVER = 2**31 - 1


class OutputWatch:
    """Remembers, on the device, which outputs were bad and in which batch each became bad.

    A single number must be finite. A larger tensor must hold no NaN; infinities are accepted, because logits are
    rightly masked with -inf.

    Args:
        only_losses: Whether only losses are looked at: a single number that the step returns, and entries whose names
            say that they are losses.
    """

    def __init__(self, *, only_losses: bool = False) -> None:
        self._only_losses = only_losses
        self._first: dict[str, Tensor] = {}
        self._places: list[str] = []
        self._n_batches = 0

    @torch.no_grad()
    def check(self, outputs: Any, place: str = "") -> None:
        """Check a batch's outputs. Does not wait for the device. `place`: the batch within its data loader."""
        if self._only_losses:
            outputs = _losses_in(outputs)
        self._places.append(place)
        named = [
            (name, floats)
            for name, tensor in named_tensors(outputs, "outputs")
            if (floats := floats_of(tensor)) is not None
        ]
        for (name, floats), norm in zip(named, norms_of([floats for _, floats in named]), strict=True):
            bad = ~torch.isfinite(floats).all() if floats.numel() == 1 else torch.isnan(norm)
            here = torch.where(bad, self._n_batches, _NEVER)
            before = self._first.get(name)
            self._first[name] = here if before is None else torch.minimum(before, here.to(before.device))
        self._n_batches += 1

    def bad_outputs(self) -> list[BadOutput]:
        """Return the bad outputs. Waits for the device, once per output of the evaluation step."""
        first = {name: int(batch) for name, batch in self._first.items()}
        return [BadOutput(name, batch, None, self._places[batch]) for name, batch in first.items() if batch != _NEVER]


def is_loss(name: str) -> bool:
    """Return whether a name says that its value is a loss. Other metrics may rightly be NaN or Inf."""
    return bool(likely_losses([name]))


def _losses_in(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs if not outputs.is_nested and outputs.numel() == 1 else None
    if isinstance(outputs, Mapping):
        return {key: value for key, value in outputs.items() if isinstance(value, Tensor) and is_loss(str(key))}
    return None


def bad_metrics(metrics: Mapping[str, Tensor]) -> list[BadOutput]:
    """Return the metrics that are NaN or Inf. Waits for the device."""
    values = {name: float(value) for name, value in metrics.items() if value.numel() == 1 and not value.is_complex()}
    return [BadOutput(name, None, value) for name, value in values.items() if not torch.isfinite(torch.tensor(value))]


class EvaluationGuard:
    """Checks the outputs and metrics of evaluation runs.

    Attributes:
        metrics: The metrics that were NaN or Inf so far: name to text.
    """

    def __init__(self, checks: bool | Literal["losses"], ranks: RankGather) -> None:
        self.metrics: dict[str, str] = {}
        self._checks, self._ranks = checks, ranks
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
        self, module: Module, logged: Mapping[str, Tensor], stage: HaltStage, step: int, history: Sequence[PastStep]
    ) -> tuple[NonFiniteError | None, str]:
        """End a run. Collective.

        Returns:
            An error if something was bad that must be finite; and a text that names other metrics, each the first time.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return None, ""
        metrics = bad_metrics(logged)
        mere = [] if self._checks is True else [each for each in metrics if not is_loss(each.name)]
        bad = (*watch.bad_outputs(), *(each for each in metrics if each not in mere))
        gathered = self._ranks.objects((bad, {each.name: f"{each} ({stage}, step {step})" for each in mere}))
        named = {name: text for _, theirs in gathered for name, text in theirs.items()}
        is_known = named.keys() <= self.metrics.keys()
        self.metrics.update({name: text for name, text in named.items() if name not in self.metrics})
        text = "" if is_known else (
            f"Metrics that were not finite in evaluation, at first: {'; '.join(self.metrics.values())}.\nTraining "
            "goes on: a metric may rightly be NaN or Inf. Where it may not, use HaltOnNaN(check_outputs=True).\n"
        )  # fmt: skip
        everyone = [theirs for theirs, _ in gathered]
        if not any(everyone):
            return None, text
        weights = bad_state(module)
        return evaluation_error(everyone, stage=stage, step=step, weights=weights, history=history), text
