"""How the cost of the mechanisms grows: each at 1, 10 and 100 times of a size, with the exponent of a fitted power.

An exponent of 1 means ten times the work for ten times the size, 0 that the size does not matter. What counts is the
processor time, the least of some repeats.

    python benchmarks/growth.py
"""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from machine import save
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import (
    EmptyCache,
    HaltOnNaN,
    LossCurves,
    MemoryMonitor,
    VirtualDevice,
    estimate_memory,
    plan_checkpoints,
)
from lightning_memtools.reporting import ranks

STEPS = 30


def stack(n_layers: int, width: int = 8) -> nn.Sequential:
    """As many linear layers, each followed by a ReLU."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(n_layers)])


class Stack(L.LightningModule):
    """The layers under a Trainer."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.net = stack(n_layers)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Notes the processor time of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.process_time())


def step_s(n_layers: int, callbacks: Sequence[L.Callback], *, steps: int = STEPS) -> float:
    """Train, and return the mean processor seconds of a step, every tenth of them logged, the first ten left out."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as root:
        L.Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=root, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=10,
                  callbacks=[*callbacks, clock]).fit(
            Stack(n_layers), DataLoader(TensorDataset(torch.randn(4 * steps, 8)), 4))  # fmt: skip
    return (clock.ends[-1] - clock.ends[9]) / (len(clock.ends) - 10)


def added_by(callback: type[L.Callback]) -> Callable[[int], float]:
    """Return a measurement of what a callback adds to a step of so many layers.

    Steps with it and without it take turns. What is below a fiftieth of the step cannot be told from noise, and counts
    as that.
    """

    def measure(n_layers: int) -> float:
        pairs = [(step_s(n_layers, [callback()]), step_s(n_layers, [])) for _ in range(2)]
        least, plain = min(with_it for with_it, _ in pairs), min(without for _, without in pairs)
        return max(least - plain, plain / 50)

    return measure


def timed(work: Callable[[int], object]) -> Callable[[int], float]:
    """Return a measurement of the processor seconds that a piece of work takes."""

    def measure(size: int) -> float:
        begin = time.process_time()
        work(size)
        return time.process_time() - begin

    return measure


def estimate(net: nn.Module, width: int) -> None:
    """Predict the memory of a step."""
    estimate_memory(net, torch.randn(4, width), step=lambda model, batch: model(batch).square().mean())


def allocate(n_tensors: int) -> None:
    """Make and free tensors on a virtual device, three alive at a time."""
    with VirtualDevice("1GiB"):
        alive: list[Tensor] = []
        for size in range(n_tensors):
            alive.append(torch.empty(1 + 37 * (size % 1000)))
            del alive[:-3]


def merge_ranks_s(n_ranks: int) -> float:
    """Return the processor seconds that rank 0 takes to read and write a point of so many ranks, without a network.

    torch's fake process group stands for the other ranks, whose parts are in the store already.
    """
    values = {f"memory/{name}": 1.5 for name in range(20)}
    written: list[list[Any]] = []
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=n_ranks)  # type: ignore[attr-defined]
    try:
        for rank in reversed(range(n_ranks)):
            with mock.patch.object(ranks, "_rank_and_world_size", return_value=(rank, n_ranks)):
                points = ranks.RankPoints("growth")
                begin = time.process_time()
                points.add("0", values, written.append)
        seconds = time.process_time() - begin
        assert len(written[0]) == n_ranks
        return seconds
    finally:
        dist.destroy_process_group()


CASES: dict[str, tuple[str, int, Callable[[int], float]]] = {
    "estimate_memory": ("layers", 10, timed(lambda n: estimate(stack(n), 8))),
    "estimate_memory, wider": ("width", 64, timed(lambda n: estimate(stack(10, n), n))),
    "plan_checkpoints": ("layers", 10, timed(lambda n: plan_checkpoints(stack(n), torch.randn(4, 8)))),
    "VirtualDevice": ("tensors made", 1000, timed(allocate)),
    "MemoryMonitor, a step": ("layers", 10, added_by(MemoryMonitor)),
    "HaltOnNaN, a step": ("layers", 10, added_by(HaltOnNaN)),
    "LossCurves, a step": ("layers", 10, added_by(LossCurves)),
    "EmptyCache, a step": ("layers", 10, added_by(EmptyCache)),
    "MemoryMonitor, a point of all ranks": ("ranks", 2, merge_ranks_s),
    "all of these, a run": (
        "steps",
        100,
        timed(lambda n: step_s(3, [MemoryMonitor(), LossCurves(), EmptyCache(), HaltOnNaN()], steps=n)),
    ),
}


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of a straight line through the logarithms (least squares)."""
    return statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in seconds]).slope


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, (of, first, measure) in CASES.items():
        sizes = [first, 10 * first, 100 * first]
        measure(first)  # fills caches
        repeats = 1 if name.endswith("a step") else 3  # a step is repeated where it is measured
        seconds = [min(measure(size) for _ in range(repeats if size < sizes[-1] else 1)) for size in sizes]
        found[name] = {
            "size": of,
            "sizes": sizes,
            "processor_ms": [round(1e3 * value, 3) for value in seconds],
            "exponent": round(exponent(sizes, seconds), 2),
            "exponent_of_the_last_ten_times": round(exponent(sizes[1:], seconds[1:]), 2),
        }
    save("growth", {"what": "processor milliseconds at 1, 10 and 100 times of a size", "cases": found})


if __name__ == "__main__":
    main()
