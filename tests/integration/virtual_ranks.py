"""A fit on two ranks, each with a VirtualDevice, started by test_virtual_device.py; leaves each rank's figures behind.

python virtual_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning as L

from lightning_memtools import VirtualDevice
from tests.lightning_models import Regression, loader, trainer


class Report(L.Callback):
    """Enters the device that it carries where none is active, and writes what the rank's device says at the end."""

    def __init__(self, root: Path, device: VirtualDevice) -> None:
        self.root = root
        self.device = device
        self.entered_here = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if VirtualDevice.current() is None:
            self.device.__enter__()
            self.entered_here = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = VirtualDevice.current()
        assert device is not None
        device.track(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = VirtualDevice.current()
        assert device is not None
        found = {
            "categories": dict(device.composition().by_category),
            "peak": device.stats().peak_allocated,
            "at_peak": sum(device.composition_at_peak().values()),
            "entered_here": self.entered_here,
        }
        (self.root / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.entered_here:
            self.device.__exit__()


def main(root: Path) -> None:
    device = VirtualDevice("1GiB")
    model = Regression(width=1000)
    run = trainer(root, Report(root, device), strategy="ddp_spawn", devices=2, logger=False, barebones=False)
    with device:
        run.fit(model, loader(32, 8))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
