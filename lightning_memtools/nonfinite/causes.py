"""The classes of cause that make a loss or a gradient NaN or Inf, and what to do about each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from types import FunctionType

import torch
from torch import Tensor
from torch.nn import functional


class NonFiniteCause(StrEnum):
    """The class of cause that makes a loss or a gradient NaN or Inf."""

    DIRTY_DATA = "dirty data"
    BAD_PARAMETER = "parameter already bad"
    EXPLODING = "exploding gradient"
    LOW_PRECISION = "low-precision overflow"
    STATE = "bad buffer or optimizer state"
    DOMAIN = "domain error of the loss or the network"
    # Only a rerun of the step can tell these two.
    OVERFLOW = "overflow"
    NOT_REPRODUCIBLE = "not reproducible"


# What to do about each cause. "inferred": without a rerun of the step, which would name the operation.
ADVICE = {
    "dirty data": "look at those samples in the data set and repair or drop them.",
    "bad weights": "check the checkpoint or code that wrote these weights; start again from a finite one.",
    "bad update": "lower the learning rate, set Trainer(gradient_clip_val=1.0), and start from an earlier checkpoint.",
    "bad state": "look at what writes it and from which inputs, also in branches that do not reach the loss and in "
    "validation; then start from an earlier checkpoint.",
    "bad attribute": "look at what writes {name}, and make it a buffer (register_buffer): buffers are restored to "
    "their values before the step.",
    "bad tensor from elsewhere": "look at what makes and writes that tensor.",
    "evaluation, weights": "the weights are the cause: start again from a finite checkpoint.",
    "evaluation": "look for log or division by 0 in the evaluation step and its metrics, and at its data.",
    "exploding": "lower the learning rate (now {rates}) or clip gradients (Trainer(gradient_clip_val=1.0)), and see "
    'that the loss is a mean over the batch (reduction="mean").',
    "low precision": 'train with precision="bf16-mixed" or "32-true", or keep this operation in float32.',
    "low precision, inferred": 'train with precision="bf16-mixed" or "32-true", or keep the operation that overflows '
    "in float32.",
    "constant": "look at where that number comes from.",
    "domain, inferred": "rerun this step with Trainer(detect_anomaly=True) to find the operation, and keep its input "
    "in range (clamp to an eps, add eps under the root, skip empty selections).",
    "not reproducible": "look first at what the step reads besides weights, buffers and the batch (iterators, files, "
    "caches, the clock, objects and globals that it writes), and make it a buffer or part of the batch, so that it is "
    "saved and restored. If there is nothing, suspect kernels that are not deterministic, values written through "
    ".data, or the hardware (memory, overclocking, a failing GPU: run its diagnostics), and go on from the last good "
    "checkpoint, on another device if it happens again.",
}


def rates_as_text(rates: Sequence[float]) -> str:
    """Return learning rates as text, each once."""
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)) or "not known"


_WITHIN_1 = "keep the input of {name} within -1 and 1: clamp it to -1 + eps and 1 - eps."
_MASKED = "a row of the input of {name} is -inf throughout: let each row's mask leave at least one position."
_NO_TARGETS = "every target is ignored or has weight 0, so that {name} is a mean over no elements: skip such batches."
_FEW_VALUES = "{name} is taken over too few values: it needs at least two, or correction=0."

_ADVICE = {
    "log": "keep the input of {name} above 0: torch.log(x.clamp(min=eps)), or compute in log space (log_softmax, "
    "logsigmoid).",
    "log1p": "keep the input of {name} above -1: clamp it.",
    "div": "keep the divisor away from 0: add an eps, or leave out what would be divided by 0.",
    "reciprocal": "keep the input of {name} away from 0: add an eps.",
    "sqrt": "keep the input of {name} above 0: torch.sqrt(x + eps). At 0 its derivative is infinite.",
    "rsqrt": "keep the input of {name} above 0: torch.rsqrt(x + eps).",
    "pow": "keep the base of {name} above 0 for exponents below 1, and away from 0 for exponents below 0.",
    "acos": _WITHIN_1,
    "asin": _WITHIN_1,
    "atanh": _WITHIN_1,
    "exp": "keep the input of {name} small: subtract the largest value first (logsumexp, softmax), or clamp it.",
    "softmax": _MASKED,
    "log_softmax": _MASKED,
    "nll_loss_forward": _NO_TARGETS,
    "nll_loss2d_forward": _NO_TARGETS,
    "ctc_loss": "a target is longer than its input allows (a repeated label needs one more position): pass "
    "zero_infinity=True, or leave such samples out.",
    "mean": "{name} is taken over no elements: skip empty selections.",
    "var": _FEW_VALUES,
    "std": _FEW_VALUES,
}
_IN_BACKWARD = {
    "std": "the derivative of {name} is not defined where all values are the same: add an eps, or skip such rows.",
    "pow": "the derivative of {name} is infinite at 0 for exponents below 1: add an eps to its input.",
    "norm": "the derivative of {name} is not defined at 0: add an eps to its input.",
    "linalg_vector_norm": "the derivative of {name} is not defined at 0: add an eps to its input.",
}


def advice_for(operation: str, of_forward: str, *, overflows: bool) -> str:
    """Return what to do about an operation outside of its domain, or whose result is too large for its type.

    Args:
        operation: Its name, such as ``"aten.log"``.
        of_forward: The forward operation whose backward it is part of; empty in forward.
        overflows: Whether its result is too large.
    """
    name = _short(of_forward or operation)
    advice = (_IN_BACKWARD.get(name) if of_forward else None) or _ADVICE.get(name)
    if advice is None and _short(operation) in _ADVICE:
        name, advice = _short(operation), _ADVICE[_short(operation)]
    advice = advice or "keep the inputs of {name} in its domain, or leave out the samples that are outside."
    if overflows and name != "exp":
        advice = "keep the inputs of {name} smaller: normalize or clamp them."
    return advice.format(name=name)


def _short(operation: str) -> str:
    return operation.rpartition(".")[2].removesuffix("_").removeprefix("_")


def public_name(operation: str) -> str:
    """Return the name under which users call an operation, such as ``"torch.log"``; itself where there is none."""
    namespace, _, name = operation.partition(".")
    room, _, rest = name.partition("_")
    plain = name.removeprefix("native_").removesuffix("_forward")
    if namespace != "aten" or name.startswith("_"):
        return operation
    if room in {"linalg", "special", "fft"} and hasattr(getattr(torch, room), rest):
        return f"torch.{room}.{rest}"
    if isinstance(getattr(functional, plain, None), FunctionType):  # torch may have an undocumented one of that name
        return f"torch.nn.functional.{plain}"
    if hasattr(torch, name) and not name.endswith("_"):
        return f"torch.{name}"
    return f"torch.Tensor.{name}" if hasattr(Tensor, name) else operation
