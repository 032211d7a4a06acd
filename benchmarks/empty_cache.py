"""What EmptyCache costs with five million live Python objects, beside emptying the cache blindly.

A residual network trains, with an evaluation of some ten seconds at another batch size after each epoch, on a
VirtualDevice with cuBLAS workspaces or, where there is one, on a GPU. Measured of each way to empty the cache:

* the time in its hooks, collection and the wait for the device included, as a share of the evaluation it belongs to
  (an epoch's evaluation and both its boundaries; what happens once before and after is listed apart),
* what has to be asked of the device again: how many segments, how many bytes; on a GPU also the time that takes: how
  much longer the first step after a boundary is than the others,
* what is reserved during evaluation.

The cases run one after another in processes of their own, so that none inherits another's objects. Without a GPU, times
are CPU times of the main thread, which does all the work: what else the machine does is not counted. (But EmptyCache
rations slow collections by the clock on the wall, so evaluations are listed by both.)

    python benchmarks/empty_cache.py
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from machine import save
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.empty_cache import EmptyCache
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.sizes import GIB, MIB

EPOCHS = 3
LIVE_OBJECTS = 5_000_000
TRAIN_BATCHES, TRAIN_SIZE = 4, 64
EVAL_BATCHES, EVAL_SIZE = 100, 48
ON_GPU = torch.cuda.is_available()
SCALE = 8 if ON_GPU else 1  # a GPU gets larger batches and more of them
HOOKS = ("setup", "teardown", *(name for name in dir(L.Callback) if name.startswith("on_")))


now_s = time.perf_counter if ON_GPU else time.thread_time


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(3))
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(x)).relu()
        y = self.norms[1](self.second(y))
        out: Tensor = (y + self.norms[2](self.short(x))).relu()
        return out


class Network(L.LightningModule):
    """A small residual network; it can keep its validation outputs."""

    def __init__(self, *, leaks: bool = False) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        self.blocks = nn.Sequential(*(Block(a, b, 2) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(widths[-1], 100)
        self.leaks = leaks
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return out

    def training_step(self, batch: Any, _batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, _batch_idx: int) -> None:
        out = self(batch[0])
        if self.leaks:
            self.outputs.append(out)
        self.log("val_loss", nn.functional.cross_entropy(out, batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class EveryEpoch(L.Callback):
    """The advice of many forums."""

    def on_train_epoch_end(self, _trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        gc.collect()
        empty_cache(pl_module.device)


class EveryFewSteps(L.Callback):
    """What the Hugging Face Trainer does with torch_empty_cache_steps=4, its documentation's example."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step % 4 == 0:
            empty_cache(pl_module.device)


CASES: dict[str, Callable[[], L.Callback]] = {
    "EmptyCache": EmptyCache,
    "EmptyCache, of a run that leaks": EmptyCache,
    "gc.collect() and empty_cache() every epoch": EveryEpoch,
    "empty_cache() every 4 steps": EveryFewSteps,
    "nothing": L.Callback,
}


class Watch(L.Callback):
    """Times evaluations and steps, and notes what is reserved."""

    def __init__(self, measured: L.Callback) -> None:
        self.hooks_s: dict[str, float] = defaultdict(float)
        self.evaluation_s: dict[str, float] = {}
        self.evaluation_wall_s: dict[str, float] = {}
        self.steps_s: list[tuple[bool, float]] = []
        self.reserved_gib: list[float] = []
        self.place = "before training"
        self.after_boundary = False
        for name in HOOKS:
            setattr(measured, name, self.timed(name, getattr(measured, name)))

    def timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = now_s()
            result = hook(*args, **kwargs)
            self.hooks_s["end of fit" if name in {"on_fit_end", "teardown"} else self.place] += now_s() - begin
            return result

        return call

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.place = f"epoch {trainer.current_epoch}"
        self.after_boundary = True

    def on_train_batch_start(self, *_: Any) -> None:
        synchronize()
        self.begin = now_s()

    def on_train_batch_end(self, *_: Any) -> None:
        synchronize()
        self.steps_s.append((self.after_boundary, now_s() - self.begin))
        self.after_boundary = False

    def on_validation_start(self, *_: Any) -> None:
        synchronize()
        self.begin_evaluation = now_s(), time.perf_counter()

    def on_validation_end(self, _trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        synchronize()
        begin, begin_wall = self.begin_evaluation
        self.evaluation_s[self.place] = now_s() - begin
        self.evaluation_wall_s[self.place] = time.perf_counter() - begin_wall
        reader = reader_for(pl_module.device)
        assert reader is not None
        self.reserved_gib.append((reader.stats().reserved or 0) / GIB)


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def empty_cache(device: torch.device) -> None:
    reader = reader_for(device)
    assert reader is not None
    reader.empty_cache()


def asked_of_the_device(virtual: VirtualDevice | None) -> tuple[int, int]:
    """How many segments were asked for since the process began, and how many bytes."""
    stats = torch.cuda.memory_stats() if virtual is None else virtual._allocator.memory_stats()
    return stats["num_device_alloc"], stats["reserved_bytes.all.allocated"]


def loader(batches: int, size: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 96, 96, generator=generator)
    batch = TensorDataset(x, torch.arange(size) % 100)
    return DataLoader(ConcatDataset([batch] * batches), size)


def run(case: str) -> dict[str, Any]:
    """One case, in this process."""
    if not ON_GPU:
        torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    annotations = [[float(i), [i, i + 1.0]] for i in range(LIVE_OBJECTS // 2)]  # two objects each
    n_objects = len(gc.get_objects())
    callback = CASES[case]()
    watch = Watch(callback)
    train = loader(TRAIN_BATCHES * SCALE, TRAIN_SIZE * SCALE, 0)
    evaluation = loader(EVAL_BATCHES * SCALE, EVAL_SIZE * SCALE, 1)
    virtual = None if ON_GPU else VirtualDevice("1GiB", cublas_workspace="8519680B")
    with virtual or nullcontext():
        L.seed_everything(0, verbose=False)
        trainer = L.Trainer(
            accelerator="cuda" if ON_GPU else "cpu", devices=1, max_epochs=EPOCHS, logger=False,
            callbacks=[callback, watch], enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Network(leaks="leaks" in case), train, evaluation)
        n_segments, n_bytes = asked_of_the_device(virtual)
    del annotations
    epochs = [f"epoch {i}" for i in range(EPOCHS)]
    first = [seconds for is_first, seconds in watch.steps_s[TRAIN_BATCHES * SCALE :] if is_first]
    others = [seconds for is_first, seconds in watch.steps_s[TRAIN_BATCHES * SCALE :] if not is_first]
    return {
        "live_objects": n_objects,
        "evaluation_s": [watch.evaluation_s[epoch] for epoch in epochs],
        "evaluation_wall_s": [watch.evaluation_wall_s[epoch] for epoch in epochs],
        "hooks_ms": {place: 1000 * seconds for place, seconds in watch.hooks_s.items()},
        "hooks_share_of_evaluation_pct": [100 * watch.hooks_s[e] / watch.evaluation_s[e] for e in epochs],
        "largest_share_of_an_evaluation_pct": max(100 * watch.hooks_s[e] / watch.evaluation_s[e] for e in epochs),
        "share_of_all_evaluations_pct": 100 * sum(watch.hooks_s.values()) / sum(watch.evaluation_s[e] for e in epochs),
        "segments_asked_for": n_segments,
        "gib_asked_for": n_bytes / GIB,
        "reserved_in_evaluation_gib": watch.reserved_gib,
        "first_step_of_an_epoch_longer_by_ms": 1000 * (statistics.median(first) - statistics.median(others)),
        "median_step_ms": 1000 * statistics.median(others),
    }


def full_collection_ms() -> dict[str, float]:
    """Milliseconds of a full collection and of a census's pass, at several numbers of live objects."""
    found: dict[str, float] = {}
    kept: list[Any] = []
    for target in (1_000_000, LIVE_OBJECTS):
        kept.append([[float(i), [i]] for i in range((target - len(gc.get_objects())) // 2)])
        n_objects = len(gc.get_objects())
        times = []
        for _ in range(5):
            begin = now_s()
            gc.collect()
            times.append(1000 * (now_s() - begin))
        found[f"{n_objects} objects"] = statistics.median(times)
    return found


def main() -> None:
    results = {}
    for case in CASES:
        print(case, file=sys.stderr)
        command = [sys.executable, str(Path(__file__)), case]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results[case] = json.loads(output.splitlines()[-1])
    nothing = results["nothing"]
    for figures in results.values():
        figures["segments_asked_for_again"] = figures["segments_asked_for"] - nothing["segments_asked_for"]
        figures["gib_asked_for_again"] = figures["gib_asked_for"] - nothing["gib_asked_for"]
    save(
        "empty_cache",
        {
            "what": f"{EPOCHS} epochs, each with an evaluation; a share is of the evaluation of the same epoch",
            "device": "GPU" if ON_GPU else "VirtualDevice(1GiB, cublas_workspace=8519680B)",
            "full_collection_ms": full_collection_ms(),
            "smallest_worth_giving_back_mib": 0.05 * (torch.cuda.get_device_properties(0).total_memory if ON_GPU
                                                      else GIB) / MIB,
            "target_share_of_evaluation_pct": 1.0,
            "cases": results,
        },
    )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(sys.argv[1])))
    else:
        main()
