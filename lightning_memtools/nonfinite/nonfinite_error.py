"""The error that ends a run which met NaN or Inf."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_memtools.nonfinite.causes import Explanation
from lightning_memtools.nonfinite.finite_checks import BadTensor

HaltStage = Literal["train", "val", "test"]


class NonFiniteError(RuntimeError):
    """Raised when a loss, a gradient, a weight, an evaluation output or a logged metric is NaN or Inf.

    The message is the same on every rank and complete by itself; the fields are for programs.

    Attributes:
        step: The training step, counted as the x axis of `self.log` counts.
        batch_idx: The index of the batch within its epoch; None where it is not known.
        rank: The rank whose loss or batch was bad; None where only the gradients were bad, which all ranks share.
        stage: train, val or test.
        cause: The class of cause, one of the values of `NonFiniteCause`; None in evaluation.
        losses: The losses of the last steps (at most 20, on this rank), oldest first; the last is the bad step's.
        parameters: The parameters whose gradients held NaN or Inf, or that held NaN or Inf themselves.
        norms: The gradient norms that belong to `losses`.
        path: The report, if it could be written.
        checkpoint_path: The checkpoint of the last good state, if one was written.
        capsule_path: The step as a file for `replay`, if one was written.
        explanation: The operation that made the first bad value, and its cause, if they were found.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        batch_idx: int | None = None,
        rank: int | None = None,
        stage: HaltStage = "train",
        cause: str | None = None,
        losses: Sequence[float] = (),
        parameters: Sequence[BadTensor] = (),
        norms: Sequence[float] = (),
        path: Path | None = None,
        checkpoint_path: Path | None = None,
        capsule_path: Path | None = None,
        explanation: Explanation | None = None,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.batch_idx = batch_idx
        self.rank = rank
        self.stage = stage
        self.cause = cause
        self.losses = tuple(losses)
        self.parameters = tuple(parameters)
        self.norms = tuple(norms)
        self.path = path
        self.checkpoint_path = checkpoint_path
        self.capsule_path = capsule_path
        self.explanation = explanation

    def __reduce__(self) -> tuple[Any, ...]:
        # Launchers that spawn processes send errors through pickle, which by default would pass the message alone.
        return _rebuild, (str(self), self.__dict__.copy())


def _rebuild(message: str, fields: dict[str, Any]) -> NonFiniteError:
    error = NonFiniteError(message, step=fields["step"])
    vars(error).update(fields)  # among them attributes that others added, such as notes
    return error
