"""Takes the pictures of the manual anew: real runs, a real TensorBoard server, a real headless Chromium.

python -m tests.pictures [NAME ...]   writes docs/images/NAME.png; without names, all of them
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_memtools as memtools
from tests.browser import chromium, get, open_memory_tab, tensorboard

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
NARROWEST = 500
"""The least width of a window of Chromium; what is narrower is emulated."""
QUIET: dict[str, Any] = {"accelerator": "cpu", "log_every_n_steps": 1, "enable_checkpointing": False}
QUIET |= {"enable_model_summary": False, "enable_progress_bar": False}


class Blocks(L.LightningModule):
    """A perceptron of wide blocks, most of whose memory are activations."""

    def __init__(self, batch_size: int = 1024) -> None:
        super().__init__()
        self.batch_size = batch_size
        blocks = (
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6)
        )
        self.blocks = nn.Sequential(*blocks)
        self.kept: list[Tensor] = []

    def training_step(self, batch, batch_idx):
        return (self.blocks(batch[0]) - batch[0].roll(1, 1)).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return rows(self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Leaky(Blocks):
    """Keeps the outputs of validation, and never clears them."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.kept.append(self.blocks(batch[0]))
        return super().validation_step(batch, batch_idx)


class Jumping(Blocks):
    """Its loss jumps at step 90, because of the batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (30 if self.trainer.global_step == 90 else 1)


class Mistaken(Blocks):
    """Compares (N, 1) with a target (N,), and does not train its last block."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rows, targets = batch
        return nn.functional.mse_loss(self.blocks[:-1](rows)[:, :1], targets)


def rows(batch_size: int, n: int = 4096) -> DataLoader[tuple[Tensor, ...]]:
    numbers = torch.randn(n, 128, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(numbers, numbers.sum(1)), batch_size)


def fit(
    logs: Path, device: str, model: L.LightningModule, callbacks: list[L.Callback], *data: Any, **options: Any
) -> None:
    """Train on a simulated GPU, whatever comes of it."""
    L.seed_everything(0, verbose=False)
    with memtools.VirtualDevice(device), contextlib.suppress(torch.OutOfMemoryError):
        trainer = L.Trainer(
            logger=TensorBoardLogger(logs, name="", version=""), callbacks=callbacks, **(QUIET | options)
        )
        trainer.fit(model, *data)


def runs(logs: Path, wanted: set[str]) -> None:
    """Write the log directories that are wanted: those of `make demo`, whose names begin with "version", and others."""
    if any(name.startswith("version") for name in wanted):
        subprocess.run(["/usr/bin/make", "--silent", "demo"], check=True, cwd=ROOT)
        shutil.copytree(ROOT / "logs" / "demo" / "lightning_logs", logs, dirs_exist_ok=True)
    watch = memtools.default_callbacks
    monitor: list[L.Callback] = [memtools.MemoryMonitor(), memtools.LossCurves()]
    curves: dict[str, Any] = {
        "MemoryMonitor": {"snapshot_at_step": 4},
        "TrainingDoctor": False,
    }
    train, val = rows(1024), rows(1024, 2048)
    if "blocks" in wanted:
        fit(logs / "blocks", "96MiB", Blocks(), watch(**curves), train, val, max_epochs=6)
    if "leak" in wanted:
        fit(logs / "leak", "96MiB", Leaky(), watch(), train, val, max_epochs=6)
    if "jumps" in wanted:
        spikes: list[L.Callback] = [memtools.LossSpikes(action="skip"), memtools.HaltOnNaN(), *monitor]
        fit(logs / "jumps", "96MiB", Jumping(512), spikes, rows(512), max_epochs=15)
    if "mistakes" in wanted:
        doctor: list[L.Callback] = [memtools.TrainingDoctor()]
        fit(logs / "mistakes", "96MiB", Mistaken(), doctor, rows(256), max_epochs=1)
    if "recovered" in wanted:
        recover: list[L.Callback] = [memtools.OOMRecovery(loss="mean"), memtools.OOMReport(), memtools.MemoryMonitor()]
        fit(logs / "recovered", "64MiB", Blocks(2048), recover, max_epochs=2)
    if "plan" in wanted:
        for name, more in (("plain", []), ("plan", [memtools.GradientCheckpointing()])):
            L.seed_everything(0, verbose=False)  # the same weights: the losses are the same bit for bit
            fit(logs / name, "96MiB", Blocks(), [*monitor, *more], max_epochs=2)


@dataclass(frozen=True)
class Picture:
    """A view of a run in the Memory tab, in a window of this size.

    Attributes:
        run: The run that is chosen.
        view: The tab's view.
        size: Width and height of the window.
        prepare: JavaScript that brings into sight what is to be seen.
        dark: Whether TensorBoard is in its dark mode.
    """

    run: str
    view: str
    size: tuple[int, int] = (1000, 900)
    prepare: str = ""
    dark: bool = False


TO_LOSS = """
[...document.querySelectorAll('.chart h3')].find((one) => one.textContent === 'Loss').scrollIntoView();
scrollBy(0, -30);"""
ONLY_SIZES = """
document.querySelectorAll('.report').forEach((one) => {
    one.open = one.querySelector('.title').textContent === 'Batch size';
});"""
OPEN_FIRST = "document.querySelector('.report').open = true;"
ONLY_TWO = """
document.querySelectorAll('.choice').forEach((one) => {
    const wanted = ['plain', 'plan'].includes(one.textContent), box = one.querySelector('input');
    if (box.checked !== wanted) box.click();
});"""
PICTURES = {
    "memory-tab": Picture("version_4", "run", (1280, 1020)),
    "memory-tab-narrow": Picture("version_4", "run", (390, 1100)),
    "memory-tab-dark": Picture("version_4", "run", (1280, 1020), dark=True),
    "memory-tab-narrow-dark": Picture("version_4", "run", (390, 1100), dark=True),
    "memory-tab-composition": Picture("blocks", "composition", (1280, 1500)),
    "loss-curves": Picture("blocks", "run", (1000, 1150), TO_LOSS),
    "empty-cache": Picture("leak", "run", (1000, 900)),
    "loss-spikes": Picture("jumps", "run", (1000, 1150), TO_LOSS),
    "oom-report": Picture("version_1", "reports", (1000, 700)),
    "oom-recovery": Picture("recovered", "reports", (1000, 800)),
    "halt-on-nan": Picture("version_3", "reports"),
    "training-doctor": Picture("mistakes", "reports", (1000, 700), OPEN_FIRST),
    "gradient-checkpointing": Picture("plan", "compare", (1000, 700), ONLY_TWO),
    "batch-size": Picture("version_2", "reports", (1000, 800), ONLY_SIZES),
}


def main(names: list[str]) -> None:
    """Make the runs, open each view, and save what the window shows."""
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        chosen = {name: PICTURES[name] for name in names or PICTURES}
        runs(logs, {one.run for one in chosen.values()})
        with tensorboard(logs, Path(folder) / "output") as address, chromium() as window:
            get(address, "plugin/lightning_memtools/runs")
            for name, shown in chosen.items():
                if shown.size[0] < NARROWEST:
                    width, height = shown.size
                    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                else:
                    window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
                    window.set_window_size(*shown.size)
                open_memory_tab(window, address, shown.run, shown.view, dark=shown.dark)
                window.execute_script("document.documentElement.style.scrollbarWidth = 'none';" + shown.prepare)
                time.sleep(1)
                window.save_screenshot(str(IMAGES / f"{name}.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
