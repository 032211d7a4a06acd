"""BatchSizeTuner against the truth and against Lightning's BatchSizeFinder, on simulated GPUs of several capacities.

The truth is exhaustive: every size is run, and the largest whose peak keeps the margin is the maximum. Every size runs
once on a device without a limit; a device with one behaves the same until its limit is reached. That the maximum fits
and the next size does not is then run on each device as well.

    python benchmarks/batch_size.py [MODEL ...]
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from machine import save

from lightning_memtools import BatchSizeTuner, VirtualDevice
from lightning_memtools.batchsize.trials import Trial
from lightning_memtools.memory.sizes import parse_size
from tests.batch_size_models import MODELS, Sized, trainer_for

MARGIN = 0.05
CAPACITIES = ("256MiB", "384MiB", "512MiB")
STEP = {"contrastive": 64, "batchnorm": 2}
"""Where the maximum is in the thousands or takes long, only multiples are admitted, for everybody."""
OTHERS = {"dropout": "96MiB"}
"""Held by another process on one more device."""


class Exhaustive(BatchSizeTuner):
    """Runs every size instead of searching, until one is over the largest limit."""

    def _run_trials(self, runner: Any, stage: Any, limits: Any, reader: Any, max_trials: int) -> list[Trial]:
        del reader, max_trials
        trials: list[Trial] = []
        while not trials or (trials[-1].readings[0].peak or 0) <= parse_size(CAPACITIES[-1]) * 1.02:
            trials.append(runner.run(stage, (len(trials) + 1) * self.multiple_of, limits))
        return trials


class Given(BatchSizeTuner):
    """Runs the given sizes."""

    sizes: Sequence[int] = ()

    def _run_trials(self, runner: Any, stage: Any, limits: Any, reader: Any, max_trials: int) -> list[Trial]:
        del reader, max_trials
        return [runner.run(stage, size, limits) for size in self.sizes]


def run(kind: type[Sized], device: VirtualDevice, callback: L.Callback) -> dict[str, Any]:
    """Tune once; the steps are those of trials, counted in the model, without those of the fit that follows."""
    steps = 0

    class Counting(kind):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nonlocal steps
            steps += 1
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root, device:
        model = Counting()
        trainer = trainer_for(kind, root, callback, max_steps=0)
        begin = time.perf_counter()
        failure = ""
        try:
            trainer.fit(model)
        except Exception as error:  # noqa: BLE001, what the other tool raises is a result
            failure = f"{type(error).__name__}: {str(error)[:80]}"
        seconds = time.perf_counter() - begin
    return {"size": model.batch_size, "steps": steps, "seconds": round(seconds, 2), "failure": failure}


def curve(name: str, kind: type[Sized]) -> dict[int, int]:
    """Size to peak in bytes, each size run."""
    tuner = Exhaustive(stages=("train",), multiple_of=STEP.get(name, 1))
    run(kind, VirtualDevice(), tuner)
    assert tuner.result is not None
    return {trial.size: trial.readings[0].peak or 0 for trial in tuner.result.trials}


def largest(peaks: Mapping[int, int], limit: float) -> int:
    return max((size for size, peak in peaks.items() if peak <= limit), default=0)


def ours(name: str, kind: type[Sized], device: VirtualDevice, truth: int) -> dict[str, Any]:
    step = STEP.get(name, 1)
    tuner = BatchSizeTuner(stages=("train",), multiple_of=step, margin=MARGIN, init_val=2)
    found = run(kind, device, tuner)
    trials = [] if tuner.result is None else [(trial.size, trial.outcome) for trial in tuner.result.trials]
    found |= {"trials": len(trials), "tried": trials, "share_of_true_maximum": round(found["size"] / truth, 4)}
    return found


def lightnings(kind: type[Sized], device: VirtualDevice, mode: str, truth: int) -> dict[str, Any]:
    finder = BatchSizeFinder(mode=mode, margin=MARGIN if mode == "binsearch" else 0.0)
    found = run(kind, device, finder)
    found["trials"] = round(found["steps"] / 3)
    found["share_of_true_maximum"] = round(found["size"] / truth, 4)
    return found


def verified(name: str, kind: type[Sized], device: VirtualDevice, truth: int) -> bool:
    """The true maximum fits on the very device, and the next size does not."""
    tuner = Given(stages=("train",), multiple_of=STEP.get(name, 1), margin=MARGIN)
    tuner.sizes = (truth, truth + STEP.get(name, 1))
    run(kind, device, tuner)
    return tuner.result is not None and [trial.fits for trial in tuner.result.trials] == [True, False]


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in sys.argv[1:] or list(MODELS):
        kind = MODELS[name]
        peaks = curve(name, kind)
        devices = [(capacity, "0MiB") for capacity in CAPACITIES]
        devices += [(CAPACITIES[-1], OTHERS[name])] if name in OTHERS else []
        for capacity, others in devices:
            truth = largest(peaks, parse_size(capacity) * (1 - MARGIN) - parse_size(others))
            if truth < 2 * STEP.get(name, 1):
                continue

            def device(capacity: str = capacity, others: str = others) -> VirtualDevice:
                return VirtualDevice(capacity, used_by_others=others)

            row = {
                "model": name, "capacity": capacity, "used_by_others": others, "true_maximum": truth,
                "verified_on_the_device": verified(name, kind, device(), truth),
                "peaks_rise_with_the_size": list(peaks.values()) == sorted(peaks.values()),
                "BatchSizeTuner": ours(name, kind, device(), truth),
                "BatchSizeFinder power": lightnings(kind, device(), "power", truth),
                "BatchSizeFinder binsearch": lightnings(kind, device(), "binsearch", truth),
            }  # fmt: skip
            print(row["model"], capacity, others, truth, row["BatchSizeTuner"], flush=True)
            rows.append(row)
    found = [row["BatchSizeTuner"] for row in rows]
    save(
        "batch_size",
        {
            "what": f"training only, margin {MARGIN}; BatchSizeFinder power knows no margin",
            "runs": len(rows),
            "never_over_the_truth": all(row["share_of_true_maximum"] <= 1 for row in found),
            "least_share": min(row["share_of_true_maximum"] for row in found),
            "share_of_runs_in_three_trials": sum(row["trials"] <= 3 for row in found) / len(found),
            "most_trials": max(row["trials"] for row in found),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
