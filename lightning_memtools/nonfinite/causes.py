"""The classes of cause that make a loss or a gradient NaN or Inf, and what to do about each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from types import FunctionType

import torch
from torch import Tensor
from torch.nn import functional


class NonFiniteCause(StrEnum):
    """The possible causes of a NaN or Inf in a loss or a gradient."""

    DIRTY_DATA = "dirty data"
    LATE_MASK = "masked too late"
    BAD_PARAMETER = "parameter already bad"
    EXPLODING = "exploding gradient"
    LOW_PRECISION = "low-precision overflow"
    STATE = "bad buffer or optimizer state"
    DOMAIN = "domain error of the loss or the network"
    OVERFLOW = "overflow"
    NOT_REPRODUCIBLE = "not reproducible"
    UNKNOWN = "not known"


# What to do about each cause. Each sentence is followed in a run by tests/nonfinite/test_advice_followed.py.
ADVICE = {
    "dirty data": "repair those samples in the data set, or drop them.",
    "late mask": "keep the samples. Their NaN seems to be meant, but the mask comes after the computation, and 0 times "
    "NaN is NaN, also in backward. Select before you compute: index with the mask (x[mask]) or replace the NaN by a "
    "number (torch.nan_to_num) before this operation, and leave those elements out of the loss as now.",
    "mask": "no target may point to a masked place, and no row may be masked throughout.",
    "bad weights": "start again from a finite checkpoint; see what wrote these weights.",
    "bad eps": 'pass eps={eps:g} to the optimizer, or train with precision="bf16-mixed" or "32-true", which keep '
    "weights in float32. Then start from an earlier checkpoint.",
    "bad update": "start from an earlier checkpoint. A learning rate that is too large may have made them (lower it), "
    "or what changes gradients after backward, such as clipping and hooks (mend it).",
    "bad state": "mend what writes it, which may be a branch that does not reach the loss, or validation; then start "
    "from an earlier checkpoint.",
    "large state": "clip gradients (Trainer(gradient_clip_val=1.0)), and start from an earlier checkpoint. If weights "
    'are float16, precision="bf16-mixed" or "32-true" keeps optimizer state in float32, which may be enough.',
    "bad attribute": "mend what writes {name}, and make it a buffer (register_buffer): buffers are restored to "
    "their values before the step.",
    "bad tensor from elsewhere": "mend what writes that tensor.",
    "evaluation, weights": "start again from a finite checkpoint: the weights are the cause.",
    "evaluation": "look at the evaluation step, its metrics and its data: it may be a log of 0 or a division by 0.",
    "exploding": "lower the learning rate (now {rates}) or clip gradients (Trainer(gradient_clip_val=1.0)). If the "
    "loss is summed over the batch, that may be the reason: take its mean.",
    "low precision": 'train with precision="bf16-mixed" or "32-true". Keeping this operation in float32 may be enough.',
    "constant": "mend what computes that number.",
    "unknown": "run this step with Trainer(detect_anomaly=True), which may name the operation.",
    "not reproducible": "look first at what the step reads besides weights, buffers and the batch (iterators, files, "
    "caches, the clock, objects and globals that it writes), and make it a buffer or part of the batch, so that it is "
    "saved and restored. If there is nothing, it may be kernels that are not deterministic, values written through "
    ".data, or the hardware (a failing GPU or memory: run its diagnostics); go on from the last good checkpoint.",
}


def rates_as_text(rates: Sequence[float]) -> str:
    """Return the distinct learning rates as a comma-separated string; "not known" if there are none."""
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)) or "not known"


_MASKED = "a row of the input of {name} is -inf throughout: let each row's mask leave at least one position."
_NO_TARGETS = "every target is ignored or has weight 0, so that {name} is a mean over no elements: skip such batches."
_FEW_VALUES = "{name} is taken over too few values: it needs at least two, or correction=0."

OF_OPERATIONS = {
    "log": "keep the input of {name} above 0: torch.log(x.clamp(min=eps)), or compute in log space (log_softmax, "
    "logsigmoid).",
    "div": "keep the divisor away from 0: add an eps.",
    "sqrt": "keep the input of {name} above 0: torch.sqrt(x + eps). At 0 its derivative is infinite.",
    "pow": "keep the base of {name} above 0: clamp it to eps, or add an eps. Its derivative may be infinite at 0, too.",
    "acos": "keep the input of {name} within -1 and 1: clamp it to -1 + eps and 1 - eps.",
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
ANY_OPERATION = "keep the inputs of {name} in its domain."
ANY_OVERFLOW = "keep the inputs of {name} smaller: normalize or clamp them."


def advice_for(operation: str, of_forward: str, *, overflows: bool) -> str:
    """Return advice for an operation, such as ``"aten.log"``, that overflows or whose input is outside its domain.

    `of_forward` names the forward operation if `operation` ran in backward; otherwise it is "".
    """
    names = [_short(each) for each in (of_forward, operation) if each]
    name = next((each for each in names if each in OF_OPERATIONS), names[0])
    advice = ANY_OVERFLOW if overflows and name != "exp" else OF_OPERATIONS.get(name, ANY_OPERATION)
    return advice.format(name=name)


def _short(operation: str) -> str:
    return operation.rpartition(".")[2].removesuffix("_").removeprefix("_")


def public_name(operation: str) -> str:
    """Return the public name of an operation, such as ``"torch.log"`` for "aten.log"; if there is none, `operation`."""
    namespace, _, name = operation.partition(".")
    plain = name.removeprefix("native_").removesuffix("_forward")
    if namespace != "aten" or name.startswith("_"):
        return operation
    if isinstance(getattr(functional, plain, None), FunctionType):  # torch may have an undocumented one of that name
        return f"torch.nn.functional.{plain}"
    if hasattr(torch, name) and not name.endswith("_"):
        return f"torch.{name}"
    return f"torch.Tensor.{name}" if hasattr(Tensor, name) else operation
