"""Collects what each rank knows of a bad step, and infers the class of cause from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Optimizer

from lightning_memtools.nonfinite.bad_step import Evidence, Past, Trip, growth
from lightning_memtools.nonfinite.causes import Cause
from lightning_memtools.nonfinite.finite_checks import BadTensor, find_bad, floats_of, norms_of
from lightning_memtools.nonfinite.micro_batches import bad_inputs
from lightning_memtools.nonfinite.tensor_names import plain_name


def examine(
    model: Module, trip: Trip, *, rank: int = 0, unkept: tuple[str, ...] = (), carried: bool = False
) -> Evidence:
    """Look at the step's batches, losses, gradients and at the weights. Call it once the step has been undone.

    Args:
        model: The module that is trained.
        trip: The bad step.
        rank: Which rank this is.
        unkept: Buffers that could not be put back.
        carried: Whether bad losses are made known to other ranks as NaN gradients.
    """
    step = trip.step
    indices = [micro.index for micro in step.micro for _ in micro.losses]
    optimizer = step.optimizer
    tensors = [*model.parameters(), *step.parameters]
    groups = optimizer.param_groups if optimizer else ()
    return Evidence(
        rank=rank,
        step=step.number,
        batches=tuple(micro.index for micro in step.micro),
        losses=tuple(zip(indices, trip.losses, strict=True)),
        norm=trip.norm,
        gradients=trip.gradients,
        parameters=tuple(bad_state(model)),
        inputs=tuple(bad for micro in step.micro for bad in bad_inputs(micro)),
        unseen=tuple(micro.index for micro in step.micro if micro.batch is None),
        learning_rates=tuple(float(group["lr"]) for group in groups if "lr" in group),
        weight_norm=_norm(list(step.parameters)),
        plain_sgd=isinstance(optimizer, SGD),
        float16=bool(trip.scaler) or any(tensor.dtype == torch.float16 for tensor in tensors),
        scaler=trip.scaler,
        late=trip.late,
        carried=carried and not all(map(math.isfinite, trip.losses)),
        unkept=unkept,
    )


def bad_state(model: Module) -> list[BadTensor]:
    """Parameters that hold NaN or Inf, and buffers that hold NaN: masks and bounds may be infinite by right."""
    parameters = find_bad((plain_name(name), parameter) for name, parameter in model.named_parameters())
    buffers = find_bad((plain_name(name), buffer) for name, buffer in model.named_buffers())
    return [*parameters, *(buffer for buffer in buffers if buffer.n_nan)]


def bad_optimizer_state(model: Module, optimizers: Iterable[Optimizer]) -> list[BadTensor]:
    """Entries of the optimizers' states that hold NaN or Inf."""
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
    """A class of cause, what speaks for it, and what to do.

    Attributes:
        cause: The class.
        because: The evidence, as a sentence.
        advice: The next step, as a sentence.
        rank: The rank whose loss or batch was bad; None where only the gradients were.
    """

    cause: Cause
    because: str
    advice: str
    rank: int | None


# Training that goes well has gradient norms and losses that fall or stay; noise stays well below this.
GREW = 10.0


# An SGD update (learning rate times gradient norm) that is larger than the weights and than this has not improved the
# weights but replaced them. The bound keeps small models out of it, whose weights may start at zero.
HUGE_UPDATE = 1e3


def diagnose(everyone: Sequence[Evidence], histories: Mapping[int, Sequence[Past]]) -> Diagnosis:
    """Say which cause the evidence of all ranks points to.

    These are inferences from what was seen, not proofs: dirty data that the loss masks out, for example, would be named
    although it did no harm.

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
    if dirty:
        return Diagnosis(
            Cause.DIRTY_DATA,
            f"{'; '.join(map(str, dirty[:3]))}.",
            "look at those samples in the data set and repair or drop them.",
            rank,
        )
    if bad and not grown:
        return Diagnosis(
            Cause.BAD_PARAMETER,
            f"{_list(bad)} held NaN or Inf before this step.",
            "check the checkpoint or code that wrote these weights; start again from a finite one.",
            rank,
        )
    if grown:
        also = f" By this step {_list(bad)} had become NaN or Inf." if bad else ""
        return Diagnosis(
            Cause.EXPLODING,
            f"{grown}.{also}",
            f"lower the learning rate (now {_rates(evidence)}), set Trainer(gradient_clip_val=1.0), and see that the "
            'loss is a mean and not a sum over the batch (reduction="mean").',
            rank,
        )
    if evidence.float16:
        return Diagnosis(
            Cause.LOW_PRECISION,
            f"{evidence.scaler or 'float16 values take part'}, and float16 ends at 65504; inputs and weights were "
            "finite and nothing had grown.",
            'train with precision="bf16-mixed" or "32-true", or keep the operation that overflows in float32.',
            rank,
        )
    return Diagnosis(
        Cause.DOMAIN,
        f"inputs and weights were finite{_unseen(evidence)} and {_calm(history)}, so an operation of this step left "
        "the range in which it is defined: log or division by 0, sqrt at 0 (in backward), exp of a large number, a "
        "mean or softmax over nothing.",
        "rerun this step with Trainer(detect_anomaly=True) to find the operation, and keep its input in range (clamp "
        "to an eps, add eps under the root, skip empty selections).",
        rank,
    )


def _culprit(everyone: Sequence[Evidence]) -> Evidence | None:
    """The first rank with a bad loss, else the first with a bad batch; a single rank is always its own."""
    if len(everyone) == 1:
        return everyone[0]
    by_loss = [each for each in everyone if any(not math.isfinite(loss) for _, loss in each.losses)]
    by_input = [each for each in everyone if any(not bad.is_mask for bad in each.inputs)]
    both = [each for each in by_loss if each in by_input]
    return next(iter([*both, *by_loss, *by_input]), None)


def what_grew(history: Sequence[Past], evidence: Evidence) -> str:
    """What grew before the step, as text; empty if nothing did."""
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


def _calm(history: Sequence[Past]) -> str:
    before = list(history)[:-1]
    if not before:
        return "this was the first step"
    return "neither loss nor gradient norm had grown before" if len(before) > 1 else "there was one good step before"


def _list(bad: Sequence[object], most: int = 3) -> str:
    rest = f" and {len(bad) - most} more" if len(bad) > most else ""
    return ", ".join(map(str, bad[:most])) + rest


def _rates(evidence: Evidence) -> str:
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(evidence.learning_rates)) or "not known"


def _unseen(evidence: Evidence) -> str:
    if not evidence.unseen:
        return ""
    batches = ", ".join(map(str, evidence.unseen))
    return f" (batch {batches} was no longer there to look at)"
