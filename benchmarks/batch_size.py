"""BatchSizeTuner against the truth and against Lightning's BatchSizeFinder, on simulated GPUs of several capacities.

Where .venv-cuda is there, each search is also made on PyTorch's own CUDA allocator, over stubs of NVIDIA's libraries,
and followed by 50 steps of training: `fit_of_50_steps_on_cuda`.

Everything runs on fake tensors: the simulated allocator sees what it sees with real ones, and nothing is computed, so
sizes that fill 8 GiB can be run by the thousand. The cost of a search is therefore given in optimizer steps and in the
samples that they took; a few rows are also run on real tensors, for CPU seconds.

The true maximum is found without the tuner: a size fits if a plain `Trainer.fit` of six steps ends without an
allocation retry on a device whose capacity is reduced by the margin. The maximum is found by bisection. As the peak of
reserved memory is not monotonic in the size, all sizes beyond it are then run too, up to 5% larger or eight more. The
largest that fits is the true maximum.

    python benchmarks/batch_size.py [MODEL ...]

All of them take a quarter of an hour. Results of models that are not named stay in results/batch_size.json.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from machine import RESULTS, save

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.batch_size_tuner import BatchSizeTuner
from lightning_memtools.memory.sizes import parse_size
from tests.batch_size_models import MODELS, Sized, trainer_for
from tests.fake_training import InMemory, fake_tensors, fakes_of

MARGIN = 0.05
CAPACITIES = ("2GiB", "3GiB", "4GiB", "8GiB")
SMALL = ("256MiB", "512MiB", "768MiB")
ON_SMALL = ("dropout", "batchnorm", "attention", "workspace", "many weights")
OTHER_CAPACITIES = {
    "adversarial, by hand": ("64MiB", "128MiB", "512MiB"),
    "index limit": ("512MiB", "2GiB"),
    "several loaders": ("256MiB", "512MiB", "2GiB"),
}
STEP = {"contrastive": 64, "batchnorm": 2}
"""Only multiples of this are admitted where the maximum is in the thousands."""
OTHERS = {"dropout": "1GiB", "attention": "1GiB"}
"""Memory that another process holds on an additional device of 4 GiB."""
FITS = "fits"
ROOT = Path(__file__).parents[1]
_ON_CUDA, _STEPS_ON_CUDA, _OUTCOME = "--on-cuda", 50, "outcome: "
SECONDS = {"workspace": "512MiB", "batchnorm": "512MiB", "checkpointing": "512MiB"}
"""Models that are also tuned on real tensors, with the capacity of the device."""


def plain_fit(kind: type[Sized], size: int, n_bytes: int, others: str) -> str:
    """Returns the outcome of a plain fit of this size on a device with this capacity."""
    device = VirtualDevice(f"{n_bytes}B", used_by_others=others)
    with tempfile.TemporaryDirectory() as root, fake_tensors(device):
        model = fakes_of(kind)(size)
        device.track(model)
        try:
            trainer_for(kind, root, max_steps=6, limit_val_batches=0).fit(model)
        except torch.OutOfMemoryError:
            return "out of memory"
        except RuntimeError as error:
            return str(error)
        retries = device.stats().alloc_retries
        return f"{retries} allocation retries in 6 steps" if retries else FITS


def true_maximum(kind: type[Sized], step: int, near: int, n_bytes: int, others: str) -> tuple[int, int]:
    """Returns the largest multiple of `step` that fits, and the number of sizes that were run."""
    ran: dict[int, bool] = {}

    def run(steps: int) -> bool:
        if steps not in ran:
            ran[steps] = plain_fit(kind, steps * step, n_bytes, others) == FITS
        return ran[steps]

    low, high = 0, max(round(near / step * 1.02), 2)
    while run(high):
        low, high = high, max(round(high * 1.1), high + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if run(middle) else (low, middle)
    most = more = low
    while more < most + max(most // 20, 8):
        more += 1
        if run(more):
            most = more
    return most * step, len(ran)


def search(
    kind: type[Sized],
    on: AbstractContextManager[Any],
    callback: L.Callback,
    *,
    make: Callable[[type[L.LightningModule]], type[L.LightningModule]] = fakes_of,
) -> dict[str, Any]:
    """Search once, without training afterwards."""
    cost = {"steps": 0, "samples": 0}

    class Counting(make(kind)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            cost["steps"] += 1
            cost["samples"] += sum(map(len, batch.values())) if isinstance(batch, dict) else len(batch)
            return super().training_step(batch, batch_idx)

    failure = ""
    with tempfile.TemporaryDirectory() as root, on:
        model = Counting()
        trainer = trainer_for(kind, root, callback, max_steps=0, limit_val_batches=0, plugins=[InMemory()])
        begin = time.process_time()
        try:
            trainer.fit(model)
        except Exception as error:  # noqa: BLE001, what the other tool raises is a result
            failure = f"{type(error).__name__}: {str(error)[:80]}"
        seconds = time.process_time() - begin
        size = model.batch_size
    return {"size": size, **cost, "cpu_seconds": round(seconds, 2), **({"failure": failure} if failure else {})}


def tuner_of(name: str) -> BatchSizeTuner:
    return BatchSizeTuner(stages=("train",), multiple_of=STEP.get(name, 1), margin=MARGIN)


def ours(name: str, kind: type[Sized], on: AbstractContextManager[Any], **options: Any) -> dict[str, Any]:
    tuner = tuner_of(name)
    found = search(kind, on, tuner, **options)
    trials = [] if tuner.result is None else [[trial.size, trial.outcome] for trial in tuner.result.trials]
    return {"trials": len(trials), **found, "tried": trials}


def lightnings(mode: str, kind: type[Sized], on: AbstractContextManager[Any], **options: Any) -> dict[str, Any]:
    finder = BatchSizeFinder(mode=mode, margin=MARGIN if mode == "binsearch" else 0.0)  # "power" applies no margin
    found = search(kind, on, finder, **options)
    return {"trials": round(found["steps"] / 3), **found}


def row(name: str, kind: type[Sized], capacity: str, others: str) -> dict[str, Any]:
    def device() -> AbstractContextManager[Any]:
        return fake_tensors(VirtualDevice(capacity, used_by_others=others))

    found = {
        "BatchSizeTuner": ours(name, kind, device()),
        "BatchSizeFinder power": lightnings("power", kind, device()),
        "BatchSizeFinder binsearch": lightnings("binsearch", kind, device()),
    }
    n_bytes = int(parse_size(capacity) * (1 - MARGIN))
    truth, n_ran = true_maximum(kind, STEP.get(name, 1), found["BatchSizeTuner"]["size"], n_bytes, others)
    for one in found.values():
        del one["cpu_seconds"]  # nothing was computed
        one["share_of_true_maximum"] = round(one["size"] / truth, 4)
        if one["size"] > truth:  # judged on the whole device, as "power" knows no margin
            one["a_plain_fit_of_it"] = plain_fit(kind, one["size"], parse_size(capacity), others)
    return {"model": name, "capacity": capacity, "used_by_others": others, "true_maximum": truth,
            "configured_size": kind().batch_size, "sizes_run_for_the_truth": n_ran,
            "fit_of_50_steps_on_cuda": fit_on_cuda(name, capacity, others),
            **found}  # fmt: skip


def fit_on_cuda(name: str, capacity: str, others: str) -> dict[str, Any] | None:
    """Searches on PyTorch's CUDA allocator, and trains for 50 steps; returns size and outcome, None without a build."""
    python = ROOT / ".venv-cuda" / "bin" / "python"
    if not python.exists():
        return None
    n_bytes = parse_size(capacity) - parse_size(others)
    command = [str(python), "-m", "lightning_memtools.null_cuda", "--capacity", f"{n_bytes}B", __file__, _ON_CUDA]
    ran = subprocess.run(
        [*command, name], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    lines = [line.removeprefix(_OUTCOME) for line in ran.stdout.splitlines() if line.startswith(_OUTCOME)]
    return json.loads(lines[0]) if lines else {"size": None, "outcome": ran.stderr.strip().splitlines()[-1][:200]}


def run_on_cuda(name: str) -> None:
    kind, tuner = MODELS[name], tuner_of(name)
    steps = _STEPS_ON_CUDA * (2 if name.startswith("adversarial") else 1)  # of both optimizers
    with tempfile.TemporaryDirectory() as root:
        model = kind()
        trainer = trainer_for(kind, root, tuner, max_steps=steps, limit_val_batches=0, accelerator="gpu", devices=1)
        outcome = FITS
        try:
            trainer.fit(model)
        except torch.OutOfMemoryError:
            outcome = f"out of memory in step {trainer.global_step}"
    trials = [] if tuner.result is None else [[one.size, one.outcome] for one in tuner.result.trials]
    print(_OUTCOME + json.dumps({"size": model.batch_size, "outcome": outcome, "tried": trials}), flush=True)


def in_seconds(name: str, kind: type[Sized], capacity: str) -> dict[str, Any]:
    """The same searches on real tensors."""

    def plain(kind: type[L.LightningModule]) -> type[L.LightningModule]:
        return kind

    return {
        "model": name,
        "capacity": capacity,
        "BatchSizeTuner": ours(name, kind, VirtualDevice(capacity), make=plain),
        "BatchSizeFinder power": lightnings("power", kind, VirtualDevice(capacity), make=plain),
        "BatchSizeFinder binsearch": lightnings("binsearch", kind, VirtualDevice(capacity), make=plain),
    }


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1:2] == [_ON_CUDA]:
        run_on_cuda(sys.argv[2])
        return
    gc.freeze()  # BatchSizeFinder collects after each trial, which takes a second over all objects of torch
    path = RESULTS / "batch_size.json"
    known: dict[str, Any] = json.loads(path.read_text()) if sys.argv[1:] else {"rows": [], "on_real_tensors": []}
    for name in sys.argv[1:] or list(MODELS):
        rows: list[dict[str, Any]] = []
        real: list[dict[str, Any]] = []
        kind = MODELS[name]
        small = SMALL if name in ON_SMALL else ()
        devices = [(capacity, "0MiB") for capacity in (*small, *OTHER_CAPACITIES.get(name, CAPACITIES))]
        devices += [("4GiB", OTHERS[name])] if name in OTHERS else []
        for capacity, others in devices:
            rows.append(row(name, kind, capacity, others))
            brief = {key: {k: v for k, v in value.items() if k != "tried"} if isinstance(value, dict) else value
                     for key, value in rows[-1].items()}  # fmt: skip
            print(brief, flush=True)
        if name in SECONDS:
            real.append(in_seconds(name, kind, SECONDS[name]))
            print(real[-1], flush=True)
        known = {
            key: sorted(
                [one for one in known[key] if one["model"] != name] + new,
                key=lambda one: list(MODELS).index(one["model"]),
            )
            for key, new in (("rows", rows), ("on_real_tensors", real))
        }
        save("batch_size", summary(known["rows"], known["on_real_tensors"]))


def summary(rows: Sequence[Mapping[str, Any]], real: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the results with the figures that the manual quotes."""
    found = [one["BatchSizeTuner"] for one in rows]
    return {
        "what": f"training, margin {MARGIN}, on fake tensors; BatchSizeFinder power knows no margin",
        "truth": "a plain fit of 6 steps on a device less by the margin, without retries; see the script",
        "runs": len(rows),
        "never_over_the_truth": all(one["share_of_true_maximum"] <= 1 for one in found),
        "median_share": statistics.median(one["share_of_true_maximum"] for one in found),
        "never_below_the_configured_size": all(
            one["size"] >= min(row["configured_size"], row["true_maximum"])
            for one, row in zip(found, rows, strict=True)
        ),
        "fits_of_50_steps_on_cuda": sum((row["fit_of_50_steps_on_cuda"] or {}).get("outcome") == FITS for row in rows),
        "least_share": min(one["share_of_true_maximum"] for one in found),
        "share_of_runs_in_three_trials": round(sum(one["trials"] <= 3 for one in found) / len(found), 3),
        "most_trials": max(one["trials"] for one in found),
        "rows": rows,
        "on_real_tensors": real,
    }


if __name__ == "__main__":
    main()
