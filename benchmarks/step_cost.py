"""What HaltOnNaN, default_callbacks() and `memtools run` add to whole training steps of about 1, 10 and 60 ms on a CPU.

A fit with callbacks stands between two without, and its mean processor time per step is divided by theirs. It is long
enough for what is done rarely (one step in 50 is logged; the host's memory is read every two seconds). The steps that
TrainingDoctor watches are left out. The floor is Lightning's calls of as many callbacks without hooks.

    python benchmarks/step_cost.py
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from machine import save, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import HaltOnNaN, default_callbacks
from lightning_memtools.verdict.in_trainer.run_summary import RunSummary

# Step in ms, roughly: (width, layers, batch, steps that are timed, repeats).
SIZES = {"1 ms": (64, 4, 16, 1500, 8), "10 ms": (256, 12, 128, 80, 6), "60 ms": (512, 16, 256, 30, 4)}
WARM_UP = 22
CASES: dict[str, Callable[[], list[L.Callback]]] = {
    "one callback without hooks": lambda: [L.Callback()],
    "HaltOnNaN()": lambda: [HaltOnNaN()],
    "six callbacks without hooks": lambda: [L.Callback() for _ in range(6)],
    "default_callbacks()": default_callbacks,
    "`memtools run`": lambda: [RunSummary.asked_for("1")],
}


class Network(L.LightningModule):
    """Linear layers with BatchNorm."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())]
        self.net = nn.Sequential(*parts, nn.Linear(width, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(L.Callback):
    """Notes the processor time at the start of each step."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.began.append(time.thread_time())


def step_ms(size: tuple[int, ...], callbacks: list[L.Callback], root: str) -> float:
    width, layers, batch, n_steps, _ = size
    torch.manual_seed(0)
    clock, batches = Clock(), [torch.randn(batch, width)] * (WARM_UP + n_steps + 1)
    L.Trainer(
        accelerator="cpu", default_root_dir=root, max_epochs=1, logger=CSVLogger(root), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, clock],
    ).fit(Network(width, layers), DataLoader(batches, batch_size=None))  # type: ignore[arg-type] # fmt: skip
    timed = clock.began[WARM_UP:]
    return 1e3 * (timed[-1] - timed[0]) / (len(timed) - 1)


def measure(size: tuple[int, ...], root: str) -> dict[str, Any]:
    bare = [step_ms(size, [], root)]
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(size[-1]):
        for name, make in CASES.items():
            with_it = step_ms(size, make(), root)
            bare.append(step_ms(size, [], root))
            ratios[name].append(with_it / statistics.mean(bare[-2:]))
    return {"bare_step_ms": spread(bare), **{name: spread(ratio) for name, ratio in ratios.items()}}


def main() -> None:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = {name: measure(size, root) for name, size in SIZES.items()}
    save("step_cost", {"steps": steps})


if __name__ == "__main__":
    main()
