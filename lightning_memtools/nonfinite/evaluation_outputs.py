"""Checks the outputs of an evaluation run on the device, and reads the result once, at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memtools.memory.nested_tensors import named_tensors
from lightning_memtools.nonfinite.finite_checks import floats_of, norms_of
from lightning_memtools.reporting.loss_names import likely_losses

_NEVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BadOutput:
    """An output or metric of an evaluation run that is NaN or Inf.

    Attributes:
        name: The place in the outputs, such as ``outputs["loss"]``, or the metric's name.
        batch: The first batch where it was bad, counted over all loaders of the run; None for a metric.
        value: The metric's value; None for an output.
        place: The batch within its data loader, where there are several; else empty.
    """

    name: str
    batch: int | None
    value: float | None
    place: str = ""

    def __str__(self) -> str:
        if self.batch is None:
            return f"metric {self.name} = {self.value}"
        return f"{self.name} from batch {self.batch} on{f' ({self.place})' if self.place else ''}"


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
