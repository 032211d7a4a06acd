"""Digests of the values that a step computes up to its first NaN: they show whether a rerun is the same step.

Where the loss and all gradients are NaN, comparing these says nothing: one NaN equals another. The output that holds
the first NaN belongs to the values with its other numbers: a NaN in the batch leaves the other samples finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import DispatchMode, has_readable_values, operator_schema
from lightning_memtools.memory.fingerprints import fingerprint
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.nonfinite.causes import public_name
from lightning_memtools.nonfinite.finite_checks import floats_of
from lightning_memtools.nonfinite.step_outcome import StepOutcome
from lightning_memtools.nonfinite.step_rerun import StepRerun

# Their outputs are memory that nobody has written; of an LSTM on the CPU, one is oneDNN's workspace.
_UNWRITTEN = ("empty", "new_empty", "resize_", "set_", "mkldnn_rnn_layer")


@dataclass(frozen=True, slots=True)
class EarlierValues:
    """The operations of a step up to the one that gives its first NaN.

    Attributes:
        operations: The names that PyTorch dispatches them by.
        digests: A number for the bits of each one's outputs, NaN as 0; 0 where two runs gave different ones.
    """

    operations: tuple[str, ...]
    digests: tuple[int, ...]

    def difference(self, now: EarlierValues) -> str:
        """Say in a sentence where a rerun first differs; empty if it does not."""
        for number, (one, other) in enumerate(zip(self.operations, now.operations, strict=False)):
            if one != other:
                return f"Operation {number} of the step is {public_name(other)}, it was {public_name(one)}."
            before, after = self.digests[number], now.digests[number]
            if before and after and before != after:
                return f"Operation {number} of the step, {public_name(one)}, gives other values than it gave then."
        if len(self.operations) != len(now.operations):
            n, n_now = len(self.operations), len(now.operations)
            return f"The first NaN comes in operation {n_now}, in the training process it came in operation {n}."
        return ""

    @property
    def n_compared(self) -> int:
        """The number of operations whose outputs can be compared."""
        return sum(map(bool, self.digests))


def values_up_to_nan(rerun: StepRerun) -> EarlierValues:
    """Run the step twice, and return what it computes up to the first NaN.

    Raises:
        CannotRerunError: The step cannot be run again.
    """
    (names, one), (again, other) = _run(rerun), _run(rerun)
    if names != again:
        return EarlierValues((), ())
    return EarlierValues(names, tuple(a if a == b else 0 for a, b in zip(one, other, strict=True)))


def says_nothing(outcome: StepOutcome) -> bool:
    """Return whether no loss and no gradient holds a finite number other than 0, so that any such step is equal."""
    floats = [each for each in map(floats_of, (*outcome.losses, *outcome.gradients.values())) if each is not None]
    return not any(bool((torch.isfinite(each) & (each != 0)).any()) for each in floats)


def _run(rerun: StepRerun) -> tuple[tuple[str, ...], Sequence[int]]:
    recorder = _ValueRecorder()
    with torch.compiler.set_stance("force_eager"):
        rerun.run(within=recorder)
    return tuple(recorder.names), [int(each) for each in recorder.digests]


class _ValueRecorder(DispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.digests: list[Tensor] = []
        self._is_over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0].replace("::", ".")
        if self._is_over or name.rpartition(".")[2].startswith(_UNWRITTEN) or not _writes(func):
            return out
        # A second backward gives zero tensors without memory; to read one ends the process.
        tensors = [each for each in tensors_in(out) if has_readable_values(each)]
        if tensors:
            self.names.append(name)
            self.digests.append(torch.stack([fingerprint(self._without_nan(each)).cpu() for each in tensors]).sum())
        return out

    def _without_nan(self, tensor: Tensor) -> Tensor:
        """Return the numbers with zeros in the place of NaN, and note a NaN: it is the last output that is read."""
        floats = floats_of(tensor)
        if floats is None or not bool((is_nan := floats.isnan()).any()):
            return tensor
        self._is_over = True
        return floats.masked_fill(is_nan, 0.0)


def _writes(func: Any) -> bool:
    """Return whether an operation computes something: it is not only a view."""
    returns = operator_schema(func).returns
    return any(each.alias_info is None or each.alias_info.is_write for each in returns)
