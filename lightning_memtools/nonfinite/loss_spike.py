"""A loss spike: what is known of it, its step in a file, and what a replay makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.memory.virtual import host_memory
from lightning_memtools.nonfinite.bad_step import BadStep, GuardedStep, MicroBatch, StepConditions, StepOutcome
from lightning_memtools.nonfinite.bad_step_rerun import BadStepRerun
from lightning_memtools.nonfinite.diagnosis import examine, rates_as_text
from lightning_memtools.nonfinite.finite_checks import floats_of, measure
from lightning_memtools.nonfinite.halt_report import CapsuleNote
from lightning_memtools.nonfinite.step_guard import StepGuard
from lightning_memtools.nonfinite.step_rerun import StepRerun
from lightning_memtools.reporting.spike_window import Spike, SpikeWindow
from lightning_memtools.state.capsule.capsule_file import LeftOut, from_plain, to_plain
from lightning_memtools.state.state_snapshot import StateSnapshot
from lightning_memtools.state.training_point import TrainingPoint, load_weights

SpikeAction = Literal["report", "skip", "rollback"]


class LossSpikeError(RuntimeError):
    """Raised by LossSpikes when more spikes come than it may act on. `spike` is the last one."""

    def __init__(self, message: str, spike: LossSpike) -> None:
        super().__init__(message)
        self.spike = spike


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike:
    """A step whose loss or gradient norm is far above those of the steps before.

    Attributes:
        step: The training step, as the x axis of the logs counts.
        batches: The indices of its batches within the epoch.
        loss: The mean of its losses; with several ranks the largest of theirs. NaN if it had none.
        norm: The norm over all its gradients, before clipping.
        loss_spike: The loss against those before it, if it is the spike.
        norm_spike: The norm against those before it, if it is the spike.
        learning_rates: Those of its optimizer.
        is_late: True if its update had been made before its values were read.
        done: What was done: "report" (nothing), "skip", "rollback" or "halt".
        taken_back: The number of updates that a rollback takes back.
        capsule: The file to replay the step from, if there is one.
        note: Why there is no capsule; "" if there is one.
        report: The file of the report, if there is one.
    """

    step: int
    batches: tuple[int, ...]
    loss: float
    norm: float
    loss_spike: Spike | None
    norm_spike: Spike | None
    learning_rates: tuple[float, ...]
    is_late: bool = False
    done: Literal["report", "skip", "rollback", "halt"] = "report"
    taken_back: int = 0
    capsule: Path | None = None
    note: str = ""
    report: Path | None = None

    def headline(self) -> str:
        """Return the spike in a sentence."""
        found = (("loss", self.loss_spike), ("gradient norm", self.norm_spike))
        what = " and ".join(f"the {name} is {spike}" for name, spike in found if spike is not None)
        batches = ", ".join(map(str, self.batches))
        return f"Spike at step {self.step} (batch {batches}): {what}."

    def action(self) -> str:
        """Return what was done, in a sentence."""
        if self.done == "skip":
            return "Its update was held back."
        if self.done == "rollback":
            return (
                f"Training was taken back by {self.taken_back} update{'s' * (self.taken_back != 1)}, and goes on with "
                "the next batch."
            )
        if self.done == "halt":
            return "Training ends: its update was not made."
        return "Nothing was changed." if self.is_late else "Nothing was changed: its update is made."

    def lines(self) -> list[str]:
        """Return everything that is known, a line each."""
        lines = [self.headline(), self.action()]
        for name, value, spike in (("Loss", self.loss, self.loss_spike), ("Gradient norm", self.norm, self.norm_spike)):
            if spike is None and not math.isnan(value):
                lines.append(f"{name}: {value:.4g}, as usual.")
            elif spike is not None:
                lines.append(
                    f"{name}: {value:.4g}. In the {spike.n_values} steps before, the median was {spike.median:.4g} and "
                    f"95% were below {spike.upper:.4g}; a spike exceeds {spike.limit:.4g}."
                )
        lines.append(f"Learning rate: {rates_as_text(self.learning_rates)}.")
        lines.append(
            f"Next: memtools replay {short_path(str(self.capsule))}"
            if self.capsule
            else f"The step was not saved: {self.note}"
        )
        return lines

    def markdown(self) -> str:
        """Return the report."""
        title = f"# Loss spike at step {self.step}"
        return "\n".join([title, "", *(f"- {line}" for line in self.lines()), ""])


class SpikeDetector:
    """Judges the losses and gradient norms of each optimizer by those of its steps before.

    Args:
        window: The number of steps to compare with.
        warm_up: The number of steps before the first one is judged.
        sensitivity: See SpikeWindow.
        least_ratio: See SpikeWindow.
    """

    def __init__(self, *, window: int, warm_up: int, sensitivity: float, least_ratio: float) -> None:
        self._made = partial(
            SpikeWindow, size=window, warm_up=warm_up, sensitivity=sensitivity, least_ratio=least_ratio
        )
        self._windows: dict[tuple[int, str], SpikeWindow] = {}

    def judge(self, optimizer: int, loss: float, norm: float) -> tuple[Spike | None, Spike | None]:
        """Return the spikes that the loss and the norm are, and note them."""
        found = []
        for kind, value in (("loss", loss), ("norm", norm)):
            window = self._windows.get((optimizer, kind)) or self._windows.setdefault((optimizer, kind), self._made())
            found.append(window.judge(value))
        return found[0], found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeComparison:
    """The loss or gradient norm when a spike's step is run again unchanged, with earlier weights, and on another batch.

    Attributes:
        kind: The value that is compared: "loss" or "gradient norm".
        median: Its median over the steps before the spike.
        same: Its value when the step is run again unchanged.
        earlier_weights: Its value with the weights of `steps_before` steps earlier; None if the capsule holds none.
        other_batch: Its value on another batch, with the same weights; None if the capsule holds none.
        steps_before: How many steps earlier the earlier weights were in use.
        other_index: The index of the other batch.
        learning_rates: The learning rates of the step.
    """

    kind: str
    median: float
    same: float
    earlier_weights: float | None
    other_batch: float | None
    steps_before: int
    other_index: int
    learning_rates: Sequence[float]

    @property
    def middle(self) -> float:
        """The value that is as far from the median as from the spike, on a logarithmic scale if both are positive."""
        return math.sqrt(self.median * self.same) if self.median > 0 else (self.median + self.same) / 2

    @property
    def made_by(self) -> Literal["batch", "weights", "both", "moment", "not known"]:
        """The maker of the spike: the batch, the updates before it, both, or only the two together in that moment."""
        if self.earlier_weights is None or self.other_batch is None:
            return "not known"
        by_batch, by_weights = not self.earlier_weights < self.middle, not self.other_batch < self.middle
        if by_batch and by_weights:
            return "both"
        return "batch" if by_batch else "weights" if by_weights else "moment"

    def lines(self) -> list[str]:
        """Return the comparison and what follows from it, a line each."""
        rows = [(f"median {self.kind} of the steps before", self.median), (f"{self.kind} of the step", self.same)]
        if self.earlier_weights is not None:
            rows.append((f"with the weights of {self.steps_before} steps before", self.earlier_weights))
        if self.other_batch is not None:
            rows.append((f"with batch {self.other_index} on the same weights", self.other_batch))
        width = max(len(name) for name, _ in rows)
        lines = ["What made the spike:"]
        lines += [f"  {name:<{width}}  {value:.4g}" for name, value in rows]
        return [*lines, self._advice()]

    def _advice(self) -> str:
        rates = rates_as_text(self.learning_rates)
        return {
            "batch": "The batch made it: it is high on earlier weights too, and another batch is not. Look at its "
            "samples and labels.",
            "weights": "The updates before it made it: another batch is high on these weights too. Lower the learning "
            f"rate (now {rates}), lengthen its warm-up, or clip gradients.",
            "both": "It is high with earlier weights and with another batch too. Look at what the step does at that "
            "point (a weight of the loss, a counter); else batch and weights have both gone wrong: look at the batches "
            f"of the last {self.steps_before} steps, and at the learning rate (now {rates}).",
            "moment": "Neither alone made it: only this batch on these weights is high. It may pass by itself; clip "
            "gradients if it returns.",
            "not known": "The capsule holds no earlier weights or no other batch to compare with.",
        }[self.made_by]


def write_spike_capsule(
    path: Path,
    *,
    guard: StepGuard,
    step: GuardedStep,
    spike: LossSpike,
    module: Any,
    trainer: Any,
    conditions: StepConditions,
    point: TrainingPoint,
    steps_before: int,
    other: MicroBatch | None,
    max_bytes: int,
) -> CapsuleNote:
    """Write the step of a spike before its update is made; everything is as it was afterwards.

    Args:
        path: The file.
        guard: The guard that has read the step.
        step: The step.
        spike: What is known of it.
        module: The LightningModule.
        trainer: The Trainer.
        conditions: The conditions that the step ran under.
        point: Earlier weights.
        steps_before: Their age in steps.
        other: Another batch.
        max_bytes: The largest size of the file.
    """
    seen = spike.loss_spike or spike.norm_spike
    assert seen is not None, "a spike is one of its loss or its norm"
    with_start = StateSnapshot([module], skip=(type(trainer),), host=host_memory)
    unrestored = guard.restore_buffers(step)
    try:
        losses = tuple(float(loss) for loss in step.losses())
        bad_step = BadStep(step, losses, spike.norm, (), late=False)
        evidence = examine(module, bad_step, unrestored=unrestored, carried=guard.carries_losses)
        rerun = BadStepRerun(module, trainer, conditions, bad_step, evidence, tuple(guard.history))
        saved = {
            "kind": "loss" if spike.loss_spike is not None else "gradient norm",
            "median": seen.median,
            "learning_rates": list(spike.learning_rates),
            "steps_before": steps_before,
            "weights": {"parameters": point.parameters, "buffers": point.buffers},
            "other": None if other is None else to_plain(other.batch, [], "batch"),
            "other_index": 0 if other is None else other.index,
        }
        return rerun.write(path, max_bytes, {"headline": spike.headline()}, {"spike": saved})
    finally:
        with_start.restore()


def compare_spike(
    rerun: StepRerun, outcome: StepOutcome, saved: Mapping[str, Any], find: Callable[[str], Any]
) -> SpikeComparison:
    """Run a spike's step with its earlier weights, and with its other batch.

    Args:
        rerun: The step, which has been entered.
        outcome: What it gave when it was run again as it was.
        saved: What the capsule holds of the spike.
        find: Finds a class by ``"module:name"``.

    Raises:
        CannotRerunError: The step cannot be run.
    """
    value = _loss_of if saved["kind"] == "loss" else _norm_of
    earlier = other = None
    same = value(outcome)
    if saved["weights"] is not None:
        rerun.reset()
        load_weights(rerun.module, **saved["weights"])
        earlier = value(rerun.run(restore=False))
    if saved["other"] is not None:
        batch = from_plain(saved["other"], find)
        if not isinstance(batch, LeftOut):
            device = next((p.device for p in rerun.module.parameters()), torch.device("cpu"))
            batch = map_tensors(batch, lambda tensor: tensor.to(device))
            other = value(rerun.run(batches=dict.fromkeys(range(len(rerun.micro)), batch)))
    return SpikeComparison(
        kind=saved["kind"],
        median=saved["median"],
        same=same,
        earlier_weights=earlier,
        other_batch=other,
        steps_before=saved["steps_before"],
        other_index=saved["other_index"],
        learning_rates=saved["learning_rates"],
    )


def _loss_of(outcome: StepOutcome) -> float:
    losses = [float(loss) for loss in outcome.losses]
    return sum(losses) / len(losses) if losses else 0.0


def _norm_of(outcome: StepOutcome) -> float:
    gradients = [floats for each in outcome.gradients.values() if (floats := floats_of(each)) is not None]
    numbers = measure(gradients, [])
    return 0.0 if numbers is None else float(numbers[0])
