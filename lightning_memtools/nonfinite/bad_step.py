"""All that is known of a bad step: each rank gathers it, the cause is inferred, the error and the report tell it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from shlex import quote
from statistics import median
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.optim import Optimizer

from lightning_memtools.memory.nested_tensors import plain_name
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.nonfinite.finite_checks import BadInput, BadTensor, find_bad
from lightning_memtools.nonfinite.step_guard import GuardedStep, PastStep
from lightning_memtools.reporting.phrases import first_of
from lightning_memtools.reporting.tables import Table, markdown_table

HaltStage = Literal["train", "val", "test"]


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


@dataclass(slots=True, kw_only=True)
class BadStep:
    """All that one rank knows about a step with NaN or Inf. Holds only plain values, so that ranks can exchange it."""

    rank: int = 0
    step: int = 0  # the training step, counted as the x axis of the logs counts
    model: str = "package:Class"  # the module's class
    batches: tuple[int, ...] = ()  # the batch indices of its micro-batches
    losses: tuple[tuple[int, float], ...] = ()  # (batch index, loss) for each loss of the step
    norm: float = math.nan  # the norm over all gradients
    gradients: tuple[BadTensor, ...] = ()  # the bad ones
    # bad before the step: parameters, buffers that held NaN, entries of optimizers' states
    before: tuple[BadTensor, ...] = ()
    inputs: tuple[BadInput, ...] = ()  # the tensors of the batches that hold NaN or Inf
    history: tuple[PastStep, ...] = ()  # the last steps; the bad one is the last
    learning_rates: tuple[float, ...] = ()
    suspects: tuple[str, str] = ("", "")  # what of the last update can have made bad weights, and what to do
    scaler: str = ""  # what the gradient scaler did, where that is the reason
    unrestored: tuple[str, ...] = ()  # the names of what could not be restored
    # --- the cause: inferred, until a rerun of the step has found the operation
    cause: NonFiniteCause = NonFiniteCause.UNKNOWN
    because: str = ""  # the evidence, as a sentence
    advice: str = ""  # the next thing to do, as a sentence
    what: str = ""  # the operation that made the first bad value, its place and its inputs; "" if not found
    why_no_operation: str = ""
    confirmed: str = ""  # the test that was made to confirm it, and its result
    doubts: tuple[str, ...] = ()  # the reasons why a rerun may differ from the step, one sentence each
    is_bad_alone: bool = False  # whether it was bad when this rank ran it alone
    # as PyTorch dispatches it, such as "aten.log"; of an operation in backward, that of its forward operation
    operation: str = ""
    backward: bool = False  # whether it was in its backward pass
    module: str = ""  # the name of the module that ran it; empty for training_step itself
    file: str | None = None
    line: int | None = None
    samples: tuple[int, ...] = ()  # the samples of the batch that are affected, where that is known
    # --- of all ranks, on the one that is told of
    is_culprit: bool = False  # whether this rank's loss, batch or rerun was bad; where none was, no rank is named
    skipped: tuple[tuple[int, tuple[int, ...]], ...] = ()  # the bad steps that were skipped before, with their batches
    # --- the files, or why there are none
    step_file: Path | str = ""
    checkpoint: Path | str = ""

    @classmethod
    def read_from(cls, step: GuardedStep) -> BadStep:
        """Create a BadStep from the values of a step that the host has already read. No tensor is read again."""
        indices = [micro.index for micro in step.micro for _ in micro.losses]
        return cls(
            step=step.number,
            batches=tuple(micro.index for micro in step.micro),
            losses=tuple(zip(indices, step.read_losses, strict=False)),
            norm=step.norm,
            gradients=step.gradients,
            scaler=step.scaler,
        )

    @property
    def has_bad_loss(self) -> bool:
        """True if any loss of the step on this rank was NaN or Inf."""
        return not all(math.isfinite(loss) for _, loss in self.losses)

    @property
    def dirty(self) -> list[BadInput]:
        """The batch tensors with NaN or Inf, except those whose only bad value is -Inf, which are likely masks."""
        return [bad for bad in self.inputs if not bad.is_mask]

    @property
    def first_bad_batch(self) -> int | None:
        """The index of the first batch whose loss or tensors hold NaN or Inf; without such a batch, the last index."""
        bad = [index for index, loss in self.losses if not math.isfinite(loss)]
        bad += [each.batch_idx for each in self.dirty]
        return next(iter([*bad, *reversed(self.batches)]), None)

    @property
    def headline(self) -> str:
        """A sentence that names the NaN or Inf that was found, and its step, batch and rank."""
        if self.has_bad_loss:
            what = f"loss is {next(loss for _, loss in self.losses if not math.isfinite(loss))}"
        elif self.gradients:
            what = f"gradient of {self.gradients[0]} is not finite"
        else:
            what = f"gradient norm is {self.norm}"
        place = f"batch {self.first_bad_batch}"
        if len(self.batches) > 1:
            place += f" of batches {self.batches[0]} to {self.batches[-1]}"
        unknown = "rank unknown: the loss and the batch of every rank were finite"
        return f"{what} at step {self.step} ({place}, {f'rank {self.rank}' if self.is_culprit else unknown})."

    def facts(self) -> list[tuple[str, str]]:
        """Return all that is known about the step, as (name, value) rows of the message and the report, a line each."""
        facts = [
            ("Cause", f"{self.cause}: {self.because}"),
            ("Operation", self.what or self.why_no_operation),
            ("Tried", self.confirmed),
            ("Losses of the step", _losses(self)),
            ("Bad gradients", named(self.gradients)),
            ("Bad weights before the step", named(self.before)),
            ("Bad inputs", "; ".join(map(str, self.inputs)) or "none"),
            ("Learning rate", rates_as_text(self.learning_rates)),
            *_series(self.history),
            ("Bad steps skipped before", ", ".join(f"{step} (batches {list(b)})" for step, b in self.skipped)),
            ("State", self._state()),
            ("Last good checkpoint", _shown(self.checkpoint)),
            ("The step as a file", _shown(self.step_file)),
        ]
        return [(what, " ".join(value.splitlines())) for what, value in facts if value]

    def _state(self) -> str:
        text = "the update was not applied; weights, optimizer state and buffers are those before the step"
        if self.before:
            text = "the update was not applied, but weights or buffers were bad before this step"
        if self.unrestored:
            text += f", except {first_of(self.unrestored)}, which this step wrote and of which there was no copy"
        return f"{text}. Other attributes of the module are as the step left them."

    def error(self) -> NonFiniteError:
        """Return the error to raise for this step. If it is in a file, its advice has the command to run it again."""
        lines = [self.headline, *(f"{what}: {value}" for what, value in self.facts()), f"Next: {self.advice}"]
        if isinstance(self.step_file, Path):
            command = f"memtools replay {quote(_shown(self.step_file))} --model {self.model}"
            lines[-1] += f" Run the step again: {command}"
        return NonFiniteError(
            "\n".join(lines),
            step=self.step,
            batch_idx=self.first_bad_batch,
            rank=self.rank if self.is_culprit else None,
            cause=self.cause.value,
            parameters=self.gradients or self.before,
            losses=tuple(past.loss for past in self.history),
            norms=tuple(past.norm for past in self.history),
            checkpoint_path=self.checkpoint if isinstance(self.checkpoint, Path) else None,
            step_path=self.step_file if isinstance(self.step_file, Path) else None,
            explanation=self if self.what else None,
        )


class NonFiniteError(RuntimeError):
    """Raised when a loss, gradient or weight is NaN or Inf, including losses that are logged in evaluation.

    The message has all details, and is the same on every rank. The attributes are for code that handles the error.

    Attributes:
        step: The training step, as on the x axis of values logged with `self.log`.
        batch_idx: The index of the batch within its epoch; None if unknown.
        rank: The rank whose loss or batch was bad; None if only the gradients, which all ranks share, were bad.
        stage: "train", "val" or "test".
        cause: The likely cause, as a value of `NonFiniteCause`; None in evaluation.
        losses: The losses of the last steps on this rank (at most 20). The bad step comes last.
        parameters: The parameters that held NaN or Inf, or whose gradients did.
        norms: The gradient norms of the same steps.
        path: The report file, if it could be written.
        checkpoint_path: The checkpoint of the last good state, if one was written.
        step_path: The file from which `replay` runs the step again, if one was written.
        explanation: The BadStep with the operation that made the first NaN or Inf; None if no operation was identified.
    """

    step: int
    batch_idx: int | None = None
    rank: int | None = None
    stage: HaltStage = "train"
    cause: str | None = None
    losses: Sequence[float] = ()
    parameters: Sequence[BadTensor] = ()
    norms: Sequence[float] = ()
    path: Path | None = None
    checkpoint_path: Path | None = None
    step_path: Path | None = None
    explanation: BadStep | None = None

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        vars(self).update(fields)


def examine(
    model: Module,
    step: GuardedStep,
    optimizers: Iterable[Optimizer],
    history: Iterable[PastStep],
    bad_at_start: frozenset[str],
) -> BadStep:
    """Examine a bad step after it was undone, and return what this rank knows about it.

    `bad_at_start` names the weights and optimizer states that already held NaN or Inf when training began.
    """
    weights, states = bad_state(model), bad_optimizer_state(model, optimizers)
    groups = [] if step.optimizer is None else step.optimizer.param_groups
    bad = BadStep.read_from(step)
    bad.model = f"{_module_name(type(model))}:{type(model).__qualname__}"
    bad.before = (*weights, *(each for each in states if each.name not in bad_at_start))
    bad.inputs = tuple(each for micro in step.micro for each in micro.bad_inputs())
    bad.history = tuple(history)
    bad.learning_rates = tuple(float(group["lr"]) for group in groups if "lr" in group)
    bad.suspects = suspects_of_update(model, optimizers, [e for e in weights if e.name not in bad_at_start])
    infer(bad)
    return bad


def _module_name(kind: type) -> str:
    """Return the name by which a class's Python module is imported. For `__main__`, return the script's name."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if kind.__module__ != "__main__" or file is None:
        return kind.__module__
    spec = getattr(main, "__spec__", None)  # `python -m package.train`
    return Path(file).stem if spec is None else str(spec.name)


def bad_state(model: Module) -> list[BadTensor]:
    """Return the parameters with NaN or Inf and the buffers with NaN. Inf in a buffer may be intended (a mask)."""
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


def suspects_of_update(model: Module, optimizers: Iterable[Optimizer], bad: Sequence[BadTensor]) -> tuple[str, str]:
    """Return (what in the last update may have caused the bad weights `bad`, advice); ("", "") if unknown."""
    names = {each.name for each in bad}
    weights = {id(p) for name, p in model.named_parameters() if plain_name(name) in names}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            dtypes = {p.dtype for p in group["params"] if id(p) in weights}
            if not dtypes:
                continue
            rate = f"a learning rate of {float(group['lr']):g}" if "lr" in group else "an unknown learning rate"
            last, eps = f"the last update was that of {type(optimizer).__name__} at {rate}", group.get("eps")
            floats = [dtype for dtype in dtypes if dtype.is_floating_point and isinstance(eps, float)]
            zero = next((dtype for dtype in floats if not torch.tensor(eps, dtype=dtype)), None)
            if zero is None:
                return last, ADVICE["bad update"]
            text = f"eps={eps:g} is 0 in {str(zero).removeprefix('torch.')}, so that the update may have divided by 0"
            least = 1e-4 if zero == torch.float16 else 1e-8
            return f"{text}; {last}", ADVICE["bad eps"].format(eps=least)
    return "", ""


GREW = 10.0  # In healthy training, gradient norms and losses fall or stay; noise stays well below this.


def infer(bad: BadStep) -> None:
    """Set `bad.cause` to the most likely cause, from the evidence so far. A rerun may find the real cause later."""
    grown = what_grew(bad)
    if bad.dirty and bad.losses and not bad.has_bad_loss:
        bad.cause, bad.advice = NonFiniteCause.LATE_MASK, ADVICE["late mask"]
        bad.because = f"the loss is finite beside {'; '.join(map(str, bad.dirty[:3]))}."
    elif bad.dirty:
        bad.cause, bad.advice = NonFiniteCause.DIRTY_DATA, ADVICE["dirty data"]
        bad.because = f"{'; '.join(map(str, bad.dirty[:3]))}."
    elif grown:
        also = f" {first_of(bad.before)} had become NaN or Inf by this step." if bad.before else ""
        bad.cause, bad.because = NonFiniteCause.EXPLODING, f"{grown}.{also}"
        bad.advice = ADVICE["exploding"].format(rates=rates_as_text(bad.learning_rates))
    elif bad.before:
        bad.cause, bad.because = NonFiniteCause.BAD_PARAMETER, f"{already_bad(bad, first_of(bad.before))}."
        bad.advice = bad.suspects[1] or ADVICE["bad weights"]
    elif bad.scaler:
        bad.cause, bad.advice = NonFiniteCause.LOW_PRECISION, ADVICE["low precision"]
        bad.because = f"{bad.scaler}, and float16 ends at 65504."
    else:
        bad.cause, bad.advice = NonFiniteCause.UNKNOWN, ADVICE["unknown"]
        bad.because = "inputs and weights were finite, and nothing had grown."


def already_bad(bad: BadStep, names: str) -> str:
    """Return a phrase saying that the tensors `names` held NaN or Inf before the step, and the suspected reason."""
    return f"{names} was already NaN or Inf before this step{f' ({bad.suspects[0]})' if bad.suspects[0] else ''}"


def what_grew(bad: BadStep) -> str:
    """Return a phrase that says what grew too large before the step (gradient norm or loss); "" if nothing."""
    before = bad.history[:-1]
    for what, values in (("gradient norm", [past.norm for past in before]), ("loss", [past.loss for past in before])):
        finite = [abs(value) for value in values if math.isfinite(value)]
        start = median(finite[: len(finite) // 2]) if len(finite) > 1 else 0.0
        if start > 0 and finite[-1] >= GREW * start:
            return f"the {what} had grown {finite[-1] / start:.3g}-fold over the {len(before)} steps before"
    return ""


def culprit_of(everyone: Sequence[BadStep]) -> BadStep | None:
    """Return the BadStep of the rank to blame; None if no rank can be blamed.

    A rank with a bad loss is blamed first, then a rank with a bad batch, then a rank whose rerun was bad as well.
    """
    if len(everyone) == 1:
        return everyone[0]
    suspected = [each for each in everyone if each.has_bad_loss or each.dirty or each.is_bad_alone]
    return max(suspected, key=lambda each: (each.has_bad_loss, bool(each.dirty), each.is_bad_alone), default=None)


def state_error(
    everyone: Sequence[Sequence[BadTensor]], *, step: int, suspects: tuple[str, str], history: Sequence[PastStep]
) -> NonFiniteError:
    """Return the error that is raised instead of saving a checkpoint with NaN or Inf. `everyone`: bad tensors per rank.

    The first of them tells the cause. `suspects`: see `suspects_of_update`.
    """
    rank, bad = next((rank, theirs) for rank, theirs in enumerate(everyone) if theirs)
    is_state = " of " in bad[0].name  # as bad_optimizer_state names it
    text, advice = ("", "") if is_state else suspects
    cause = NonFiniteCause.BAD_PARAMETER if text else NonFiniteCause.STATE
    made = f"the last update may have made it: {text}" if text else "what wrote it is not known"
    if is_state and not bad[0].n_nan:  # finite gradients can make Inf of an optimizer's state, but no NaN
        made, advice = "the square of a gradient may be too large for its type", ADVICE["large state"]
    lines = [
        f"{bad[0]} is not finite at step {step} (rank {rank}). No checkpoint was written.",
        f"Bad weights, buffers and optimizer state: {named(bad)}.",
        f"Cause: {cause}: losses and gradients were finite; {made}.",
        *(f"{what}: {values}" for what, values in _series(history)),
        f"Next: {advice or ADVICE['bad state']}",
    ]
    losses, norms = tuple(past.loss for past in history), tuple(past.norm for past in history)
    return NonFiniteError(
        "\n".join(lines), step=step, rank=rank, cause=cause.value, parameters=tuple(bad), losses=losses, norms=norms
    )


def evaluation_error(
    everyone: Sequence[Mapping[str, float]], *, stage: HaltStage, step: int, weights: Sequence[BadTensor]
) -> NonFiniteError:
    """Return the error for an evaluation run that logged bad losses. `everyone` has one dict of bad losses per rank."""
    bad = [f"{name} = {value} (rank {rank})" for rank, theirs in enumerate(everyone) for name, value in theirs.items()]
    lines = [
        f"The {stage} run at step {step} logged a loss that is not finite: {'; '.join(bad)}.",
        f"Bad weights: {named(weights)}.",
        f"Next: {ADVICE['evaluation, weights' if weights else 'evaluation']}",
    ]
    rank = next(rank for rank, theirs in enumerate(everyone) if theirs)
    return NonFiniteError("\n".join(lines), step=step, stage=stage, rank=rank, parameters=tuple(weights))


def named(bad: Sequence[BadTensor]) -> str:
    """Return a string that lists the first five bad tensors and counts the rest; "none" if there are none."""
    return first_of(bad, 5) or "none"


def as_report(error: NonFiniteError) -> str:
    """Return an error's message as markdown, with a table of its facts."""
    headline, *facts, advice = str(error).splitlines()
    rows = [tuple(line.partition(": ")[::2]) for line in (advice, *facts)]
    return f"# Not finite: {headline}\n\n{markdown_table(Table(('', ''), rows, 'll'))}\n"


def _shown(file: Path | str) -> str:
    return file if isinstance(file, str) else short_path(str(file))


def _losses(bad: BadStep) -> str:
    if not bad.losses:
        return "none seen"
    return ", ".join(f"{loss:.6g}" + f" (batch {index})" * (len(bad.losses) > 1) for index, loss in bad.losses)


def _series(history: Sequence[PastStep]) -> list[tuple[str, str]]:
    is_seen = bool(history) and not math.isnan(history[0].loss)  # a module may take its gradients past Lightning
    return [
        ("Last losses", " ".join(f"{past.loss:.4g}" for past in history if is_seen)),
        ("Last gradient norms", " ".join(f"{past.norm:.4g}" for past in history)),
    ]
