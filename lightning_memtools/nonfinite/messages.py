"""What to say of NaN and Inf found outside of a training step: after an evaluation run, before a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memtools.nonfinite.confirm import BadTensor
from lightning_memtools.nonfinite.history import Past
from lightning_memtools.nonfinite.outputs import BadOutput

MOST_NAMES = 5  # in a message; the report lists all


def evaluation_message(
    everyone: Sequence[Sequence[BadOutput]], *, stage: str, step: int, weights: Sequence[BadTensor]
) -> str:
    """What to say when outputs or metrics of an evaluation run are NaN or Inf."""
    found = [
        f"{bad}{f' (rank {rank})' * (len(everyone) > 1)}" for rank, theirs in enumerate(everyone) for bad in theirs
    ]
    if weights:
        advice = "the weights are the cause: start again from a finite checkpoint."
    else:
        advice = (
            "look at the data of the first bad batch, and at domain errors (log or division by 0) in the evaluation "
            "step and its metrics; if the value may be NaN or Inf by right, use HaltOnNaN(check_outputs=False)."
        )
    return "\n".join(
        [
            f"The {stage} run at step {step} gave values that are not finite: {'; '.join(found)}.",
            f"Bad weights: {named(weights, 'none')}.",
            f"Next: {advice}",
        ]
    )


def overflow_message(
    bad: Sequence[BadTensor], *, step: int, rank: int, history: Sequence[Past], learning_rates: Sequence[float]
) -> str:
    """What to say when finite gradients made an update that was not finite, seen before a checkpoint."""
    return "\n".join(
        [
            f"{bad[0]} is not finite after the update of step {step} (rank {rank}). No checkpoint was written.",
            f"Bad weights and optimizer state: {named(bad, 'none')}.",
            "Cause: exploding gradient: losses and gradients were finite, so the update itself overflowed.",
            f"Learning rate: {', '.join(f'{rate:g}' for rate in dict.fromkeys(learning_rates))}",
            f"Last losses: {series([past.loss for past in history])}",
            f"Last gradient norms: {series([past.norm for past in history])}",
            "Next: lower the learning rate, set Trainer(gradient_clip_val=1.0), and start from an earlier checkpoint.",
        ]
    )


def named(bad: Sequence[BadTensor], otherwise: str) -> str:
    """The first of the bad tensors, as text; `otherwise` where there is none."""
    if not bad:
        return otherwise
    rest = f" and {len(bad) - MOST_NAMES} more" if len(bad) > MOST_NAMES else ""
    return ", ".join(map(str, bad[:MOST_NAMES])) + rest


def series(values: Sequence[float]) -> str:
    """Numbers, as text."""
    return " ".join(f"{value:.4g}" for value in values)
