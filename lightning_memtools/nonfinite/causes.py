"""The classes of cause, what an explanation says, and what to do about each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


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


_ABOVE_0 = "keep the input of {name} above 0"


_WITHIN_1 = "keep the input of {name} within -1 and 1: clamp it to -1 + eps and 1 - eps."


_MASKED = "a row of the input of {name} is -inf throughout: let each row's mask leave at least one position."


_NO_TARGETS = "every target is ignored or has weight 0, so that {name} takes the mean of nothing: skip such batches."


_DEGENERATE = "the derivative of {name} is infinite where two of its values are equal: use what does not depend on the "


_DEGENERATE += "vectors, or add noise to its input."


_ADVICE = {
    "log": f"{_ABOVE_0}: torch.log(x.clamp(min=eps)), or compute in log space (log_softmax, logsigmoid).",
    "log2": f"{_ABOVE_0}: clamp it to an eps.",
    "log10": f"{_ABOVE_0}: clamp it to an eps.",
    "log1p": "keep the input of {name} above -1: clamp it.",
    "div": "keep the divisor away from 0: add an eps, or leave out what would be divided by 0.",
    "reciprocal": "keep the input of {name} away from 0: add an eps.",
    "sqrt": f"{_ABOVE_0}: torch.sqrt(x + eps). At 0 its derivative is infinite.",
    "rsqrt": f"{_ABOVE_0}: torch.rsqrt(x + eps).",
    "pow": "keep the base of {name} above 0 for exponents below 1, and away from 0 for exponents below 0.",
    "acos": _WITHIN_1,
    "asin": _WITHIN_1,
    "atanh": _WITHIN_1,
    "exp": "keep the input of {name} small: subtract the largest value first (logsumexp, softmax), or clamp it.",
    "softmax": _MASKED,
    "log_softmax": _MASKED,
    "nll_loss_forward": _NO_TARGETS,
    "nll_loss2d_forward": _NO_TARGETS,
    "ctc_loss": "a target is longer than its input allows (a label that repeats needs one more place): pass "
    "zero_infinity=True, or leave such samples out.",
    "mean": "{name} is taken over nothing: skip empty selections.",
    "var": "{name} is taken over too few values: at least two are needed, or correction=0.",
    "std": "{name} is taken over too few values: at least two are needed, or correction=0.",
    "native_batch_norm": "look at the variance: a batch of one value per channel has none.",
}


_IN_BACKWARD = {
    "std": "the derivative of {name} is not defined where all values are the same: add noise or an eps, or skip such "
    "rows.",
    "pow": "the derivative of {name} is infinite at 0 for exponents below 1: add an eps to its input.",
    "norm": "the derivative of {name} is not defined at 0: add an eps to its input.",
    "linalg_vector_norm": "the derivative of {name} is not defined at 0: add an eps to its input.",
    "linalg_svd": _DEGENERATE,
    "linalg_eigh": _DEGENERATE,
}


def advice_for(operation: str, of_forward: str) -> str:
    """What to do about an operation, named as ``"aten.log"``; of_forward: what it is the backward of."""
    name = _short(of_forward or operation)
    advice = (_IN_BACKWARD.get(name) if of_forward else None) or _ADVICE.get(name)
    if advice is None and _short(operation) in _ADVICE:
        name, advice = _short(operation), _ADVICE[_short(operation)]
    advice = advice or "keep what {name} takes in the range where it is defined, or leave out the samples that are not."
    return advice.format(name=name)


def advice_on_overflow(operation: str, of_forward: str) -> str:
    """As `advice_for`, where the operation is defined for what it took but its result is too large."""
    name = _short(of_forward or operation)
    return (_ADVICE["exp"] if name == "exp" else "keep what {name} takes smaller: normalize or clamp it.").format(
        name=name
    )


def _short(operation: str) -> str:
    return operation.rpartition(".")[2].removesuffix("_").removeprefix("_")


class Cause(StrEnum):
    """What makes a loss or a gradient NaN or Inf."""

    DIRTY_DATA = "dirty data"
    BAD_PARAMETER = "parameter already bad"
    EXPLODING = "exploding gradient"
    LOW_PRECISION = "low-precision overflow"
    DOMAIN = "domain error of the loss or the network"
    # These two take a replay of the step to tell.
    OVERFLOW = "overflow"
    NOT_REPRODUCIBLE = "not reproducible"
