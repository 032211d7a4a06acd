"""BatchSizeTuner against the truth and against Lightning's BatchSizeFinder, on simulated GPUs of several capacities.

Where .venv-cuda is there, each search is also made on PyTorch's own CUDA allocator, over stubs of NVIDIA's libraries,
and followed by 50 steps of training: `fit_of_50_steps_on_cuda`.

Everything runs on fake tensors: the simulated allocator sees what it sees with real ones, and nothing is computed, so
sizes that fill 8 GiB can be run by the thousand. The cost of a search is therefore given in optimizer steps and in the
samples that they took; a few rows are also run on real tensors, for CPU seconds.

The true maximum is found without the tuner: a size fits if a plain `Trainer.fit` of six steps ends without an
allocation retry on a device whose capacity is reduced by the margin, unless that is smaller than a segment of the
allocator. The maximum is found by bisection. As the peak of
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
from machine import known, save

from lightning_memtools import VirtualDevice
from lightning_memtools.batch_size.size_limits import SEGMENT_BYTES
from lightning_memtools.callbacks.batch_size_tuner import BatchSizeTuner
from lightning_memtools.memory.sizes import parse_size
from tests.batch_size_models import MODELS, Sized, trainer_for
from tests.fake_training import InMemory, fake_tensors, fakes_of

TOOLS = ("BatchSizeTuner", "BatchSizeFinder power", "BatchSizeFinder binsearch")
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


def true_maximum(kind: type[Sized], step: int, near: int, n_bytes: int, others: str) -> int:
    """Returns the largest multiple of `step` that fits."""
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
    return most * step


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
    return {"trials": 0 if tuner.result is None else len(tuner.result.trials), **found}


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
    n_bytes = parse_size(capacity)
    if n_bytes * MARGIN >= SEGMENT_BYTES:
        n_bytes = int(n_bytes * (1 - MARGIN))
    truth = true_maximum(kind, STEP.get(name, 1), found["BatchSizeTuner"]["size"], n_bytes, others)
    return {"capacity": capacity, "used_by_others": others, "true_maximum": truth,
            "fit_of_50_steps_on_cuda": fit_on_cuda(name, capacity, others), **found}  # fmt: skip


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
    print(_OUTCOME + json.dumps({"size": model.batch_size, "outcome": outcome}), flush=True)


def in_seconds(name: str, kind: type[Sized], capacity: str) -> dict[str, Any]:
    """The same searches on real tensors."""

    def plain(kind: type[L.LightningModule]) -> type[L.LightningModule]:
        return kind

    return {
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
    for name in sys.argv[1:] or list(MODELS):
        kind, rows = MODELS[name], list[dict[str, Any]]()
        small = SMALL if name in ON_SMALL else ()
        devices = [(capacity, "0MiB") for capacity in (*small, *OTHER_CAPACITIES.get(name, CAPACITIES))]
        devices += [("4GiB", OTHERS[name])] if name in OTHERS else []
        for capacity, others in devices:
            rows.append(row(name, kind, capacity, others))
            print(rows[-1], flush=True)
        real = in_seconds(name, kind, SECONDS[name]) if name in SECONDS else None
        models = known("batch_size").get("models", {}) | {name: in_columns(rows, real)}
        save("batch_size", summary({name: models[name] for name in MODELS if name in models}))


def in_columns(rows: Sequence[Mapping[str, Any]], real: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the searches of a model: a column for each figure, with an entry for each device.

    A size is None where the tool ended the fit with the model's own error.
    """
    others = [f" less {row['used_by_others']}" if row["used_by_others"] != "0MiB" else "" for row in rows]
    return {
        "devices": [row["capacity"] + other for row, other in zip(rows, others, strict=True)],
        "true_maximum": [row["true_maximum"] for row in rows],
        "fits_of_50_steps_on_cuda": sum((row["fit_of_50_steps_on_cuda"] or {}).get("outcome") == FITS for row in rows),
        **{tool: {
            "size": [row[tool]["size"] if "failure" not in row[tool] else None for row in rows],
            **{key: [row[tool][key] for row in rows] for key in ("trials", "samples")},
        } for tool in TOOLS},
    } | ({} if real is None else {"on_real_tensors": real["capacity"], "size, steps, cpu_seconds": {
        tool: [real[tool][key] for key in ("size", "steps", "cpu_seconds")] for tool in TOOLS}})  # fmt: skip


def summary(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the columns of each model, with the figures that the manual quotes."""
    found: dict[str, Any] = {
        "margin": MARGIN,
        "searches": sum(len(one["devices"]) for one in models.values()),
        "fits_of_50_steps_on_cuda": sum(one["fits_of_50_steps_on_cuda"] for one in models.values()),
    }
    for tool in TOOLS:
        sizes = [
            (size, truth)
            for one in models.values()
            for size, truth in zip(one[tool]["size"], one["true_maximum"], strict=True)
        ]
        shares = [round(100 * size / truth, 2) for size, truth in sizes if size is not None]
        trials = [n for one in models.values() for n in one[tool]["trials"]]
        found[tool] = {
            "least_share_pct": min(shares),
            "median_share_pct": statistics.median(shares),
            "over_the_maximum": sum(share > 100 for share in shares),
            "fits_that_failed": len(sizes) - len(shares),
            "median_trials": statistics.median(trials),
            "most_trials": max(trials),
        }
    return {**found, "models": dict(models)}


if __name__ == "__main__":
    main()
