"""Which learning rate would have lowered the loss of a step that has run away, tried in float64."""

from __future__ import annotations

import math

import torch

from lightning_memtools.nonfinite.cause.changes import wide, widened_batch
from lightning_memtools.nonfinite.rerun.rerun import CannotRerunError, Rerun

_SMALLEST = 8  # powers of ten below the present rate


def try_rates(rerun: Rerun, rate: float) -> str:
    """Try an SGD update with this rate, a tenth of it, and so on; what came out, as a sentence, or empty.

    An update that makes the loss of its own batch larger has gone too far. Float64, because the loss of a run that has
    diverged is beyond float32.
    """
    batches = {i: widened_batch(micro.batch, torch.float64) for i, micro in enumerate(rerun.micro)}
    rerun.reset()
    found: list[tuple[float, float]] = []
    try:
        # What `wide` puts in the place of the weights is dropped at its end, with what is done to it here.
        with wide(rerun.module, torch.float64):
            outcome = rerun.run(batches=batches, restore=False)
            loss = sum(float(each) for each in outcome.losses)
            if not math.isfinite(loss):
                return ""
            parameters = {rerun.names[id(p)]: p for p in rerun.module.parameters()}
            moves = [(parameters[name], parameters[name].data, g.clone()) for name, g in outcome.gradients.items()]
            for power in range(_SMALLEST + 1):
                tried = rate / 10**power
                for parameter, start, gradient in moves:
                    parameter.data = start - tried * gradient
                after = sum(float(each) for each in rerun.run(batches=batches, restore=False).losses)
                found.append((tried, after / loss if loss else math.nan))
                if after < loss:
                    break
    except CannotRerunError:
        return ""
    (_, factor), (good, lowered) = found[0], found[-1]
    if len(found) == 1 or not lowered < 1:
        return ""
    return (
        f"an update at the rate {rate:g} multiplies the loss of this batch by {factor:.3g}, one at {good:g} lowers it"
    )
