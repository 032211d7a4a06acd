"""Collects what each rank knows of a bad step, and infers the class of cause from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Optimizer

from lightning_memtools.memory.nested_tensors import plain_name
from lightning_memtools.nonfinite.bad_step import UPDATE_OVERFLOWED, BadStep, Evidence, PastStep, growth
from lightning_memtools.nonfinite.causes import ADVICE, NonFiniteCause, rates_as_text
from lightning_memtools.nonfinite.finite_checks import BadTensor, find_bad, floats_of, norms_of
from lightning_memtools.nonfinite.micro_batches import bad_inputs
from lightning_memtools.reporting.phrases import first_of


def examine(
    model: Module, bad_step: BadStep, *, rank: int = 0, unrestored: tuple[str, ...] = (), carried: bool = False
) -> Evidence:
    """Return what this rank knows: of the step's batches, losses, gradients and of the weights. Call it after the undo.

    Args:
        model: The module that is trained.
        bad_step: The bad step.
        rank: This rank.
        unrestored: The names of the buffers that could not be restored.
        carried: Whether NaN gradients tell the other ranks of bad losses.
    """
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
    """A class of cause, the evidence for it, and what to do.

    Attributes:
        cause: The class.
        because: The evidence, as a sentence.
        advice: The next step, as a sentence.
        rank: The rank whose loss or batch was bad; None where only the gradients were.
    """

    cause: NonFiniteCause
    because: str
    advice: str
    rank: int | None


# In healthy training, gradient norms and losses fall or stay; noise stays well below this.
GREW = 10.0


# An SGD update (learning rate times gradient norm) that is larger than the weights and than this has not improved the
# weights but replaced them. The bound leaves out small models, whose weights may start at zero.
HUGE_UPDATE = 1e3


def diagnose(everyone: Sequence[Evidence], histories: Mapping[int, Sequence[PastStep]]) -> Diagnosis:
    """Return the cause that the evidence of all ranks points to.

    This is an inference and no proof: dirty data that the loss masks out, for example, would be named although it did
    no harm.

    Args:
        everyone: The evidence of each rank.
        histories: The last steps as each rank saw them; the bad one is the last.
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
