"""How long an out-of-memory report takes on a simulated device, with all of its checks and as long as they may take.

    python benchmarks/oom_report.py

Writes results/oom_report.json. Wall time is that of a busy or an idle machine, as it comes; processor time is not.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from machine import save
from torch import nn
from torch.utils.data import DataLoader

from lightning_memtools import OOMReport, VirtualDevice
from lightning_memtools.callbacks import _oom_write

WIDTH, LENGTH = 64, 32
LAYERS = (6, 12, 24)
PLENTY_S = 600.0


class Blocks(L.LightningModule):
    """So many transformer blocks, of little computation."""

    def __init__(self, n: int, batch: int, val_batch: int = 1) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True) for _ in range(n)]
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 100)
        self.batch, self.val_batch = batch, val_batch

    def training_step(self, batch: Any) -> Any:
        return self.head(self.blocks(batch)).square().mean()

    def validation_step(self, batch: Any) -> None:
        self.training_step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def loader(self, n_batches: int, size: int) -> Any:
        rows: Any = torch.zeros(1, LENGTH, WIDTH).expand(n_batches * size, -1, -1)
        return DataLoader(rows, batch_size=size)

    def train_dataloader(self) -> Any:
        return self.loader(100, self.batch)

    def val_dataloader(self) -> Any:
        return self.loader(1, self.val_batch)


class Timed(OOMReport):
    """Notes how long the report takes."""

    def on_exception(self, *args: Any) -> None:
        wall, processor = time.perf_counter(), time.process_time()
        super().on_exception(*args)
        self.took = {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}


def report(model: L.LightningModule, capacity: str, checks_s: float, *, n_batches: int) -> dict[str, Any]:
    """One run that fails: how long its report took, and how many actions it could check."""
    _oom_write.CHECKS_S = checks_s
    with tempfile.TemporaryDirectory() as folder, VirtualDevice(capacity):
        timed = Timed(directory=folder)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, default_root_dir=folder, limit_train_batches=n_batches,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            callbacks=[timed],
        )  # fmt: skip
        try:
            trainer.fit(model)
        except torch.OutOfMemoryError:
            text = next(Path(folder).glob("oom-*.md")).read_text()
            advice = text.partition("## What happened")[0]
            n_unchecked = advice.count("Not checked")
            n_all = len(re.findall(r"^(?:\d+\.|-) ", advice, re.MULTILINE))
            return {
                "headline": text.splitlines()[0].removeprefix("# "),
                **timed.took,
                "checked": n_all - n_unchecked,
                "unchecked": n_unchecked,
            }
    raise RuntimeError(f"{type(model).__name__} fits in {capacity}.")


def measure() -> dict[str, Any]:
    """Training that fails at once, by the number of layers; evaluation that fails after a history of 50,000 actions."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    allowed_s = _oom_write.CHECKS_S
    cases: dict[str, Any] = {}
    for n in LAYERS:
        for name, seconds in (("all", PLENTY_S), ("as allowed", allowed_s)):
            cases[f"{n} layers, {name}"] = report(Blocks(n, 96), f"{8 * n}MiB", seconds, n_batches=1)
    for name, seconds in (("all", PLENTY_S), ("as allowed", allowed_s)):
        cases[f"evaluation, {name}"] = report(Blocks(6, 1, 2000), "100MiB", seconds, n_batches=60)
    return {"allowed_s": allowed_s, "cases": cases}


def main() -> int:
    save("oom_report", measure())
    return 0


if __name__ == "__main__":
    sys.exit(main())
