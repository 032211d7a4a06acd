"""Says why a step cannot run on fake tensors, and estimates it on real CPU tensors instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.nn.utils.rnn import PackedSequence

from lightning_memtools._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from lightning_memtools.estimate.batch_sizes import first_rows
from lightning_memtools.estimate.memory_estimate import MemoryEstimate
from lightning_memtools.estimate.trace_reading import read_estimate
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.user_code import user_line_of
from lightning_memtools.simulation.step import Recipe, batch_size_of
from lightning_memtools.simulation.tracer import SimulationSettings, Subject, trace

_SMALL = (4, 16)
"""The batch sizes of the fallback: small, and far enough apart that rounding to 512 bytes matters little."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why a step cannot run on fake tensors, with the line of the user's code."""

    why: str


def explain(error: Exception) -> Obstacle | None:
    """Return why a step failed if it is because its tensors are fake; None for an error of the user's own."""
    line = user_line_of(error)
    where = "an unknown line" if line is None else f"{line} ({line.source})"
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        what = str(error.func)
        return Obstacle(f"The step reads values at {where}: {what} needs them, and an estimate has none.")
    if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
        name = getattr(error, "func", None) or _name_of_custom_operator(str(error))
        return Obstacle(
            f"The operator {name} at {where} has no kernel for fake tensors. Register one with "
            "torch.library.register_fake, and the estimate needs no extrapolation."
        )
    text = str(error)
    if isinstance(error, RuntimeError) and (".numpy() is not supported" in text or "with FakeTensor" in text):
        return Obstacle(f"The step takes values out of a tensor at {where}: {text.splitlines()[0]}")
    return None


def estimate_on_cpu(
    subject: Subject,
    batch: Any,
    recipe: Recipe,
    settings: SimulationSettings,
    obstacle: Obstacle,
    *,
    capacity: str | None,
) -> MemoryEstimate:
    """Run the step on copies of the real tensors at two small batch sizes, and extrapolate linearly.

    Raises:
        RuntimeError: The model or the batch has no values either.
    """
    size = batch_size_of(batch)
    is_small = size is None or size <= _SMALL[-1]
    parts = [batch] if is_small or _holds_packed(batch) else [first_rows(batch, n) for n in _SMALL]
    _check_values(subject, batch, obstacle)
    runs = [trace(subject, part, recipe, settings, values=True) for part in parts]
    own = "" if not settings.cuda else " Attention, recurrent layers and autocast ran as on the CPU."
    if size is None or len(runs) == 1:
        note = f"{obstacle.why} So the step ran on real CPU tensors.{own}"
        return read_estimate(
            runs[-1], subject.model, batch, settings, capacity=capacity, retrace=_cannot_retrace, notes=(note,)
        )
    small, large = (
        read_estimate(run, subject.model, batch, settings, capacity=capacity, retrace=_cannot_retrace) for run in runs
    )
    note = (
        f"{obstacle.why} So the step ran on real CPU tensors at batch sizes {_SMALL[0]} and {_SMALL[1]}, and a "
        f"straight line through the two gives the figures for {size}; modules and timeline are those of "
        f"{_SMALL[1]}.{own}"
    )
    return _Line(small, large, *_SMALL, note).at(size)


@dataclass(frozen=True, slots=True)
class _Line:
    """Estimates at two batch sizes, and the straight line through them."""

    small: MemoryEstimate
    large: MemoryEstimate
    n_small: int
    n_large: int
    note: str

    def at(self, size: int) -> MemoryEstimate:
        """Return the estimate at a batch size."""

        def line(small: int, large: int) -> int:
            return round(small + (large - small) * (size - self.n_small) / (self.n_large - self.n_small))

        small, large = self.small, self.large
        return replace(
            large,
            peak_allocated=line(small.peak_allocated, large.peak_allocated),
            peak_reserved=line(small.peak_reserved, large.peak_reserved),
            composition={name: line(small.composition[name], n_bytes) for name, n_bytes in large.composition.items()},
            step_peaks=tuple(map(line, small.step_peaks, large.step_peaks)),
            convolution_workspaces=max(0, line(small.convolution_workspaces, large.convolution_workspaces)),
            batch_size=size,
            notes=(self.note,),
            _trace=None,
            _retrace=self.at,
        )


def _name_of_custom_operator(text: str) -> str:
    """Return the name of an operator made with torch.library.custom_op, from torch's message."""
    found = re.search(r"<CustomOpDef\((.+?)\)>", text)
    return found[1] if found else text.split("\n", maxsplit=1)[0]


def _check_values(subject: Subject, batch: Any, obstacle: Obstacle) -> None:
    tensors = (*tensors_in(batch), *subject.model.parameters())
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
        raise RuntimeError(
            f"{obstacle.why} The step could run on real CPU tensors instead, but the model or the batch has no values. "
            "Pass a real model and a real batch (a few samples are enough), or a step that reads no values."
        )


def _holds_packed(batch: Any) -> bool:
    """Return whether a batch has packed sequences: their first dimension is not the batch."""
    if isinstance(batch, Mapping):
        return any(map(_holds_packed, batch.values()))
    return isinstance(batch, PackedSequence) or (isinstance(batch, (list, tuple)) and any(map(_holds_packed, batch)))


def _cannot_retrace(size: int) -> MemoryEstimate:
    raise ValueError(
        f"A step that reads values cannot be estimated at batch size {size} from this batch: pass one of more than "
        f"{_SMALL[-1]} samples, whose tensors begin with the batch (packed sequences do not)."
    )
