"""A loss spike in a file: writes its step with earlier weights and another batch, and compares them in a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.memory.virtual import host_memory
from lightning_memtools.nonfinite.bad_step import BadStep, GuardedStep, MicroBatch, StepConditions, StepOutcome
from lightning_memtools.nonfinite.bad_step_rerun import BadStepRerun
from lightning_memtools.nonfinite.diagnosis import examine
from lightning_memtools.nonfinite.finite_checks import floats_of, measure
from lightning_memtools.nonfinite.halt_report import CapsuleNote
from lightning_memtools.nonfinite.loss_spike import LossSpike, SpikeComparison
from lightning_memtools.nonfinite.step_guard import StepGuard
from lightning_memtools.nonfinite.step_rerun import StepRerun
from lightning_memtools.state.capsule.capsule_file import LeftOut, from_plain, to_plain
from lightning_memtools.state.state_snapshot import StateSnapshot
from lightning_memtools.state.training_point import TrainingPoint, load_weights


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
