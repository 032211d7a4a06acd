"""The classes of cause, what an explanation says, and what to do about each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    UPDATE = "bad update"
    DOMAIN = "domain error of the loss or the network"
    # Only a rerun of the step can tell these two.
    OVERFLOW = "overflow"
    NOT_REPRODUCIBLE = "not reproducible"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOfStep:
    """The facts that are known of a bad step without running it again.

    Attributes:
        grown: Says what had grown before it; empty if nothing had.
        learning_rates: The learning rates of the update.
        plain_sgd: Whether an update is the learning rate times the gradient.
        scaler: Says what the gradient scaler did, where that is the reason.
        doubts: The reasons why a rerun may differ from the step, one sentence each.
        changed: The names of state that a rerun cannot put back, and that is not as it was when training began.
    """

    grown: str = ""
    learning_rates: Sequence[float] = ()
    plain_sgd: bool = False
    scaler: str = ""
    doubts: Sequence[str] = ()
    changed: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The operation that made the first bad value, and its cause. Plain values: they are sent to the other ranks.

    Attributes:
        cause: The class of cause.
        what: The operation, its place and its inputs, as a sentence.
        because: The evidence for the class, as a sentence.
        confirmed: The tests that were made to confirm it, and their results; empty where none could be made.
        advice: The next step, as a sentence.
        operation: The name that PyTorch dispatches the operation by, such as ``"aten.log"``; of an operation in
            backward, that of its forward operation. `public_name` gives the name that users call it by.
        backward: Whether it was in its backward pass.
        module: The name of the module that ran it; empty for training_step itself.
        file: The user's file; None if unknown.
        line: The line in it.
        samples: The samples of the batch that are affected, where that is known.
        batch_idx: The batch.
    """

    cause: NonFiniteCause
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


# What to do about each cause. "inferred": without a rerun of the step, which would name the operation.
_LOWER_THE_RATE = "lower the learning rate (now {rates}) or clip gradients (Trainer(gradient_clip_val=1.0))"
_USE_WIDER_TYPES = 'train with precision="bf16-mixed" or "32-true", or keep '
ADVICE = {
    "dirty data": "look at those samples in the data set and repair or drop them.",
    "bad weights": "check the checkpoint or code that wrote these weights; start again from a finite one.",
    "bad attribute": "look at what writes {name}, and make it a buffer (register_buffer): buffers are restored to "
    "their values before the step, and saved in capsules.",
    "bad tensor from elsewhere": "look at what makes and writes that tensor.",
    "exploding": f"{_LOWER_THE_RATE}.",
    "exploding sum": f"{_LOWER_THE_RATE}, and make the loss a mean: it is a sum over the batch.",
    "exploding, inferred": "lower the learning rate (now {rates}), set Trainer(gradient_clip_val=1.0), and see that "
    'the loss is a mean and not a sum over the batch (reduction="mean").',
    "overflow in all samples": "Every sample is affected, so look at the weights and the learning rate (now {rates}) "
    "too.",
    "low precision": f"{_USE_WIDER_TYPES}this operation in float32.",
    "low precision, inferred": f"{_USE_WIDER_TYPES}the operation that overflows in float32.",
    "rounding": 'keep this operation and the operations before it in float32, or train with precision="32-true".',
    "constant": "look at where that number comes from.",
    "domain, inferred": "rerun this step with Trainer(detect_anomaly=True) to find the operation, and keep its input "
    "in range (clamp to an eps, add eps under the root, skip empty selections).",
    "update applied": "look at the state or setting that is named; go on from an earlier checkpoint. With "
    "HaltOnNaN(undo_updates=True) such an update is undone, for a copy of weights and optimizer state in each step.",
    "update": "look at the code or setting that is named; the gradients were finite when backward ended.",
    "not reproducible, changed": "look at these first: the value that made the step bad may have come from one of "
    "them. Make it a buffer or part of the batch, so that it is saved and restored.",
    "not reproducible": "nothing that the step reads is known to have changed: suspect kernels that are not "
    "deterministic, values written through .data, or the hardware (memory, overclocking, a failing GPU: run its "
    "diagnostics); go on from the last good checkpoint, on another device if it happens again.",
}


def rates_as_text(rates: Sequence[float]) -> str:
    """Return learning rates as text, each once."""
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)) or "not known"


_ABOVE_0 = "keep the input of {name} above 0"


_WITHIN_1 = "keep the input of {name} within -1 and 1: clamp it to -1 + eps and 1 - eps."


_MASKED = "a row of the input of {name} is -inf throughout: let each row's mask leave at least one position."


_NO_TARGETS = "every target is ignored or has weight 0, so that {name} is a mean over no elements: skip such batches."


_DEGENERATE = (
    "the derivative of {name} is infinite where two of its values are equal: compute the loss without the vectors, or "
    "add noise to its input."
)


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
    "ctc_loss": "a target is longer than its input allows (a repeated label needs one more position): pass "
    "zero_infinity=True, or leave such samples out.",
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
    "linalg_svd": _DEGENERATE,
    "linalg_eigh": _DEGENERATE,
}


def advice_for(operation: str, of_forward: str) -> str:
    """Return what to do about an operation outside of its domain.

    Args:
        operation: Its name, such as ``"aten.log"``.
        of_forward: The forward operation whose backward it is part of; empty in forward.
    """
    name = _short(of_forward or operation)
    advice = (_IN_BACKWARD.get(name) if of_forward else None) or _ADVICE.get(name)
    if advice is None and _short(operation) in _ADVICE:
        name, advice = _short(operation), _ADVICE[_short(operation)]
    advice = advice or "keep the inputs of {name} in its domain, or leave out the samples that are outside."
    return advice.format(name=name)


def advice_on_overflow(operation: str, of_forward: str) -> str:
    """Return what to do about an operation whose result is too large for its type; arguments as in `advice_for`."""
    name = _short(of_forward or operation)
    return (_ADVICE["exp"] if name == "exp" else "keep the inputs of {name} smaller: normalize or clamp them.").format(
        name=name
    )


def _short(operation: str) -> str:
    return operation.rpartition(".")[2].removesuffix("_").removeprefix("_")


# Operations whose public function has another name.
_PUBLIC_NAMES = {
    "aten._to_copy": "torch.Tensor.to",
    "aten._native_batch_norm_legit": "torch.nn.functional.batch_norm",
    "aten.native_batch_norm": "torch.nn.functional.batch_norm",
    "aten.native_layer_norm": "torch.nn.functional.layer_norm",
    "aten.native_group_norm": "torch.nn.functional.group_norm",
    "aten.native_dropout": "torch.nn.functional.dropout",
    "aten.nll_loss_forward": "torch.nn.functional.nll_loss",
    "aten.nll_loss2d_forward": "torch.nn.functional.nll_loss",
    "aten.ctc_loss": "torch.nn.functional.ctc_loss",
}
_PUBLIC_MODULES = {"linalg": torch.linalg, "special": torch.special, "fft": torch.fft}


def public_name(operation: str) -> str:
    """Return the name under which users call an operation.

    Args:
        operation: The name that PyTorch dispatches it by, such as ``"aten.log"``.

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
