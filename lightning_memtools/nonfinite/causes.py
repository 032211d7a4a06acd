"""The classes of cause that make a loss or a gradient NaN or Inf, and what to do about each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from types import FunctionType

import torch
from torch import Tensor


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
_LOWER_THE_RATE = "lower the learning rate (now {rates}) or clip gradients (Trainer(gradient_clip_val=1.0))"
_USE_WIDER_TYPES = 'train with precision="bf16-mixed" or "32-true", or keep '
ADVICE = {
    "dirty data": "look at those samples in the data set and repair or drop them.",
    "bad weights": "check the checkpoint or code that wrote these weights; start again from a finite one.",
    "bad attribute": "look at what writes {name}, and make it a buffer (register_buffer): buffers are restored to "
    "their values before the step.",
    "bad tensor from elsewhere": "look at what makes and writes that tensor.",
    "exploding": f'{_LOWER_THE_RATE}, and see that the loss is a mean over the batch (reduction="mean").',
    "low precision": f"{_USE_WIDER_TYPES}this operation in float32.",
    "low precision, inferred": f"{_USE_WIDER_TYPES}the operation that overflows in float32.",
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


_ABOVE_0 = "keep the input of {name} above 0"

_WITHIN_1 = "keep the input of {name} within -1 and 1: clamp it to -1 + eps and 1 - eps."

_MASKED = "a row of the input of {name} is -inf throughout: let each row's mask leave at least one position."

_NO_TARGETS = "every target is ignored or has weight 0, so that {name} is a mean over no elements: skip such batches."

_ADVICE = {
    "log": f"{_ABOVE_0}: torch.log(x.clamp(min=eps)), or compute in log space (log_softmax, logsigmoid).",
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
    "ctc_loss": "a target is longer than its input allows (a repeated label needs one more position): pass "
    "zero_infinity=True, or leave such samples out.",
    "mkldnn_rnn_layer": "keep the input of torch.nn.LSTM finite: where a mask fills it with Inf, fill with 0.",
    "mean": "{name} is taken over no elements: skip empty selections.",
    "var": "{name} is taken over too few values: it needs at least two, or correction=0.",
    "std": "{name} is taken over too few values: it needs at least two, or correction=0.",
    "native_batch_norm": "look at the variance: a batch of one value per channel has none.",
}

_IN_BACKWARD = {
    "std": "the derivative of {name} is not defined where all values are the same: add noise or an eps, or skip such "
    "rows.",
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


# Operations whose public function has another name.
_PUBLIC_NAMES = {
    "aten._to_copy": "torch.Tensor.to",
    "aten._native_batch_norm_legit": "torch.nn.functional.batch_norm",
    "aten.native_batch_norm": "torch.nn.functional.batch_norm",
    "aten.native_layer_norm": "torch.nn.functional.layer_norm",
    "aten.native_group_norm": "torch.nn.functional.group_norm",
    "aten.mkldnn_rnn_layer": "torch.nn.LSTM",
    "aten.native_dropout": "torch.nn.functional.dropout",
    "aten.nll_loss_forward": "torch.nn.functional.nll_loss",
    "aten.nll_loss2d_forward": "torch.nn.functional.nll_loss",
    "aten.ctc_loss": "torch.nn.functional.ctc_loss",
}
_PUBLIC_MODULES = {"linalg": torch.linalg, "special": torch.special, "fft": torch.fft}


def public_name(operation: str) -> str:
    """Return the name under which users call an operation.

    Returns:
        Such as ``"torch.log"``, ``"torch.nn.functional.nll_loss"`` or ``"torch.Tensor.div_"``; the same name where the
        operation has no public one.
    """
    namespace, _, name = operation.partition(".")
    room, _, rest = name.partition("_")
    functional = torch.nn.functional
    if namespace != "aten" or operation in _PUBLIC_NAMES:
        public = _PUBLIC_NAMES.get(operation, operation)
    elif room in _PUBLIC_MODULES and hasattr(_PUBLIC_MODULES[room], rest):
        public = f"torch.{room}.{rest}"
    elif isinstance(getattr(functional, name, None), FunctionType):  # torch may have an undocumented one of that name
        public = f"torch.nn.functional.{name}"
    elif name.startswith("_") or not (hasattr(torch, name) or hasattr(Tensor, name)):
        public = operation
    else:
        public = f"torch.{name}" if hasattr(torch, name) and not name.endswith("_") else f"torch.Tensor.{name}"
    return public
