"""What is known of a bad step before it is run again, and what is known after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_memtools.nonfinite.diagnose import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What is known of the step without running it again.

    Attributes:
        grown: What had grown before it, as text; empty if nothing had.
        learning_rates: Those of the update.
        plain_sgd: Whether an update is the learning rate times the gradient.
        scaler: What the gradient scaler did, where that is the reason.
        doubts: Why a replay may differ from the step, one sentence each.
    """

    grown: str = ""
    learning_rates: Sequence[float] = ()
    plain_sgd: bool = False
    scaler: str = ""
    doubts: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Which operation made the first bad value, and why. Plain values: it travels between ranks.

    Attributes:
        cause: The class of cause.
        what: The operation, its place and what went in, as a sentence.
        because: What speaks for the class, as a sentence.
        confirmed: What was tried to confirm it and how that went; empty where nothing could be tried.
        advice: The next step, as a sentence.
        operation: The operation, as ``"aten.log"``; of a backward pass, the forward operation it belongs to.
        backward: Whether it was in its backward pass.
        module: The name of the module whose operation it is; empty for training_step itself.
        file: The user's file; None if unknown.
        line: The line in it.
        samples: The samples of the batch that are affected, where that is known.
        batch_idx: The batch.
    """

    cause: Cause
    what: str
    because: str
    confirmed: str
    advice: str
    operation: str = ""
    backward: bool = False
    module: str = ""
    file: str | None = None
    line: int | None = None
    samples: tuple[int, ...] = ()
    batch_idx: int | None = None
