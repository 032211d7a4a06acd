"""Measures the host time that LossSpikes adds to a step that HaltOnNaN reads, in a real fit.

The clock runs around the two calls that LossSpikes makes in each step: judging what was read, and the end of the batch.
A copy of the weights in host memory is one call in a hundred, and stands apart.

    python benchmarks/loss_spikes.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import lightning as L
import torch
from machine import save, spread
from torch import nn
from torch.utils.data import DataLoader

from lightning_memtools import HaltOnNaN, LossSpikes
from lightning_memtools.callbacks.spikes_run import SpikesRun

N_STEPS = 1000
WIDTHS = {"2 thousand parameters": 16, "1 million parameters": 600}


class Net(L.LightningModule):
    """A perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        del batch_idx
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def timed(times: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with its microseconds added to a list."""

    def run(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args, **options)
        times.append(1e6 * (time.perf_counter() - begin))
        return result

    return run


def measured(width: int, action: Any) -> dict[str, Any]:
    """Train, and return the microseconds per step of each call."""
    read, end, point = list[float](), list[float](), list[float]()
    batches: Any = list(torch.randn(N_STEPS, 8, 64))
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[HaltOnNaN(), LossSpikes(action=action, directory="/nonexistent/never/written")],
    )  # fmt: skip
    with (
        mock.patch.object(SpikesRun, "read", timed(read, SpikesRun.read)),
        mock.patch.object(SpikesRun, "_take_point", timed(point, SpikesRun._take_point)),
        mock.patch.object(SpikesRun, "end_batch", timed(end, SpikesRun.end_batch)),
    ):
        trainer.fit(Net(width), DataLoader(batches, batch_size=None))
    each = [one + other for one, other in zip(read, end, strict=True)]
    return {
        "us_per_step": spread(each),
        "share_of_a_1_ms_step_pct": round(median(each) / 10, 2),
        "us_per_copy": spread(point),
        "copies": len(point),
    }


def main() -> None:
    """Measure all, and save the result."""
    torch.set_num_threads(1)
    save(
        "loss_spikes",
        {
            name: {action: measured(width, action) for action in ("report", "rollback")}
            for name, width in WIDTHS.items()
        },
    )


if __name__ == "__main__":
    main()
