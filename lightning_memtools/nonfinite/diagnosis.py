"""The classes of cause and what to do about each; and what the evidence of all ranks points to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import FunctionType

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Optimizer

from lightning_memtools.memory.nested_tensors import plain_name
from lightning_memtools.nonfinite.bad_step import UPDATE_OVERFLOWED, BadStep, Evidence, PastStep, bad_inputs, growth
from lightning_memtools.nonfinite.finite_checks import BadTensor, find_bad, floats_of, norms_of
from lightning_memtools.reporting.phrases import first_of


class NonFiniteCause(StrEnum):
    """The class of cause that makes a loss or a gradient NaN or Inf."""

    DIRTY_DATA = "dirty data"
    BAD_PARAMETER = "parameter already bad"
    EXPLODING = "exploding gradient"
    LOW_PRECISION = "low-precision overflow"
    UPDATE = "bad update"
    STATE = "bad buffer or optimizer state"
    DOMAIN = "domain error of the loss or the network"
    # Only a rerun of the step can tell these two.
    OVERFLOW = "overflow"
    NOT_REPRODUCIBLE = "not reproducible"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOfStep:
    """The facts that are known of a bad step without running it again."""

    grown: str = ""  # says what had grown before it; empty if nothing had
    learning_rates: Sequence[float] = ()  # the learning rates of the update
    plain_sgd: bool = False  # whether an update is the learning rate times the gradient
    scaler: str = ""  # says what the gradient scaler did, where that is the reason
    doubts: Sequence[str] = ()  # the reasons why a rerun may differ from the step, one sentence each


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


def examine(
    model: Module, bad_step: BadStep, *, rank: int = 0, unrestored: tuple[str, ...] = (), carried: bool = False
) -> Evidence:
    """Return what this rank knows of the step's batches, losses, gradients and the weights. Call it after the undo."""
    step = bad_step.step
    indices = [micro.index for micro in step.micro for _ in micro.losses]
    optimizer = step.optimizer
    tensors = [*model.parameters(), *step.parameters]
    groups = optimizer.param_groups if optimizer else ()
    return Evidence(
        rank=rank,
        step=step.number,
        batches=tuple(micro.index for micro in step.micro),
        losses=tuple(zip(indices, bad_step.losses, strict=True)),
        norm=bad_step.norm,
        gradients=bad_step.gradients,
        parameters=tuple(bad_state(model)),
        inputs=tuple(bad for micro in step.micro for bad in bad_inputs(micro)),
        unseen=tuple(micro.index for micro in step.micro if micro.batch is None),
        learning_rates=tuple(float(group["lr"]) for group in groups if "lr" in group),
        weight_norm=_norm(list(step.parameters)),
        plain_sgd=isinstance(optimizer, SGD),
        float16=bool(bad_step.scaler) or any(tensor.dtype == torch.float16 for tensor in tensors),
        scaler=bad_step.scaler,
        late=bad_step.late,
        update=bad_step.update,
        is_lost=bad_step.is_lost,
        carried=carried and not all(map(math.isfinite, bad_step.losses)),
        unrestored=unrestored,
    )


def bad_state(model: Module) -> list[BadTensor]:
    """Return parameters that hold NaN or Inf, and buffers that hold NaN: masks and bounds may rightly be infinite."""
    parameters = find_bad((plain_name(name), parameter) for name, parameter in model.named_parameters())
    buffers = find_bad((plain_name(name), buffer) for name, buffer in model.named_buffers())
    return [*parameters, *(buffer for buffer in buffers if buffer.n_nan)]


def bad_optimizer_state(model: Module, optimizers: Iterable[Optimizer]) -> list[BadTensor]:
    """Return the entries of the optimizers' states that hold NaN or Inf."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return find_bad(
        (f"{key} of {names.get(id(parameter), 'a parameter')}", value)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if isinstance(state, Mapping)
        for key, value in state.items()
        if isinstance(value, Tensor)
    )


def _norm(tensors: list[Tensor]) -> float:
    floats = [each for tensor in tensors if (each := floats_of(tensor)) is not None]
    return math.hypot(*(float(norm) for norm in norms_of(floats)))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A class of cause, the evidence for it, and what to do."""

    cause: NonFiniteCause
    because: str  # the evidence, as a sentence
    advice: str  # the next step, as a sentence
    rank: int | None  # the rank whose loss or batch was bad; None where only the gradients were


# In healthy training, gradient norms and losses fall or stay; noise stays well below this.
GREW = 10.0


# An SGD update (learning rate times gradient norm) that is larger than the weights and than this has not improved the
# weights but replaced them. The bound leaves out small models, whose weights may start at zero.
HUGE_UPDATE = 1e3


def diagnose(everyone: Sequence[Evidence], histories: Mapping[int, Sequence[PastStep]]) -> Diagnosis:
    """Return the cause that the evidence of all ranks points to.

    This is an inference and no proof: dirty data that the loss masks out, for example, would be named although it did
    no harm.
    """
    culprit = _culprit(everyone)
    evidence = culprit or everyone[0]
    rank = culprit.rank if culprit else None
    history = histories[evidence.rank]
    grown = what_grew(history, evidence)
    dirty = [bad for bad in evidence.inputs if not bad.is_mask]
    bad = evidence.parameters
    if evidence.update:
        because = f"losses and gradients were finite when backward ended; {evidence.update}."
        advice, overflows = (
            ADVICE["update applied" if evidence.is_lost else "update"],
            UPDATE_OVERFLOWED in evidence.update,
        )
        if overflows:
            advice = f"{ADVICE['exploding, inferred'].format(rates=rates_as_text(evidence.learning_rates))} {advice}"
        cause = NonFiniteCause.EXPLODING if overflows else NonFiniteCause.UPDATE
        return Diagnosis(cause, because, advice, evidence.rank)
    if dirty:
        return Diagnosis(
            NonFiniteCause.DIRTY_DATA,
            f"{'; '.join(map(str, dirty[:3]))}.",
            ADVICE["dirty data"],
            rank,
        )
    if bad and not grown:
        return Diagnosis(
            NonFiniteCause.BAD_PARAMETER,
            f"{first_of(bad)} held NaN or Inf before this step.",
            ADVICE["bad weights"],
            rank,
        )
    if grown:
        also = f" By this step {first_of(bad)} had become NaN or Inf." if bad else ""
        return Diagnosis(
            NonFiniteCause.EXPLODING,
            f"{grown}.{also}",
            ADVICE["exploding, inferred"].format(rates=rates_as_text(evidence.learning_rates)),
            rank,
        )
    if evidence.float16:
        return Diagnosis(
            NonFiniteCause.LOW_PRECISION,
            f"{evidence.scaler or 'float16 values take part'}, and float16 ends at 65504; inputs and weights were "
            "finite and nothing had grown.",
            ADVICE["low precision, inferred"],
            rank,
        )
    return Diagnosis(
        NonFiniteCause.DOMAIN,
        f"inputs and weights were finite{_unseen(evidence)} and {_calm(history)}, so an operation of this step was "
        "outside of its domain: log or division by 0, sqrt at 0 (in backward), exp of a large number, a mean or "
        "softmax over no elements.",
        ADVICE["domain, inferred"],
        rank,
    )


def _culprit(everyone: Sequence[Evidence]) -> Evidence | None:
    """Return the evidence of the first rank with a bad loss, else with a bad batch; a single rank's own in any case."""
    if len(everyone) == 1:
        return everyone[0]
    by_loss = [each for each in everyone if any(not math.isfinite(loss) for _, loss in each.losses)]
    by_input = [each for each in everyone if any(not bad.is_mask for bad in each.inputs)]
    both = [each for each in by_loss if each in by_input]
    return next(iter([*both, *by_loss, *by_input]), None)


def what_grew(history: Sequence[PastStep], evidence: Evidence) -> str:
    """Say what grew before the step; empty if nothing did."""
    before = list(history)[:-1]
    for what, values in (("gradient norm", [past.norm for past in before]), ("loss", [past.loss for past in before])):
        factor = growth(values)
        if factor is not None and factor >= GREW:
            return f"the {what} had grown {factor:.3g}-fold over the {len(before)} steps before"
    norms = [past.norm for past in before if math.isfinite(past.norm)]
    if evidence.plain_sgd and norms and evidence.learning_rates:
        update = max(evidence.learning_rates) * norms[-1]
        if update >= HUGE_UPDATE and not update < evidence.weight_norm / 2:  # also where the weights are NaN by now
            return f"the last update (learning rate times gradient norm: {update:.3g}) was as large as the weights"
    return ""


def _calm(history: Sequence[PastStep]) -> str:
    before = list(history)[:-1]
    if not before:
        return "this was the first step"
    return "neither loss nor gradient norm had grown before" if len(before) > 1 else "there was one good step before"


def _unseen(evidence: Evidence) -> str:
    if not evidence.unseen:
        return ""
    batches = ", ".join(map(str, evidence.unseen))
    return f" (batch {batches} was no longer held)"
