"""A dry run of a Trainer with every callback of this library at once."""

from __future__ import annotations

import contextlib
import csv
import io
import re

import pytest
from lightning.pytorch import Callback

import lightning_memtools
from lightning_memtools.null_cuda.dry_run.api import dry_run
from tests.null_cuda.dry_run_scripts import MIB, write_script

pytestmark = pytest.mark.cuda_memory

SCRIPT = """
    import lightning as L
    import torch
    from lightning.pytorch.loggers import CSVLogger
    from lightning_memtools import (
        BatchSizeTuner, EmptyCache, GradientCheckpointing, HaltOnNaN, LossCurves, LossSpikes, MemoryMonitor,
        OOMRecovery, OOMReport, TrainingDoctor,
    )
    from torch import nn
    from torch.utils.data import DataLoader

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            blocks = (nn.Sequential(nn.Linear(8, 2**15), nn.GELU(), nn.Linear(2**15, 8)) for _ in range(4))
            self.net = nn.Sequential(*blocks)
        def training_step(self, batch, _):
            return self.net(batch).square().mean()
        def validation_step(self, batch, _):
            self.log("val_loss", self.net(batch).square().mean())
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    if __name__ == "__main__":
        rows = torch.zeros(1).expand(10**7, 8)
        train, val = (DataLoader(rows, batch_size=64) for _ in range(2))
        callbacks = [
            BatchSizeTuner(max_trials=4), GradientCheckpointing(), MemoryMonitor(), LossCurves(), EmptyCache(),
            OOMReport(), OOMRecovery(loss="mean"), HaltOnNaN(), LossSpikes(), TrainingDoctor(),
        ]
        trainer = L.Trainer(callbacks=callbacks, logger=CSVLogger("logs"), log_every_n_steps=1, limit_val_batches=2)
        trainer.fit(Model(), train, val)
        trainer.validate(dataloaders=val)
"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The dry run on a device of 512 MiB, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("everything")
    with contextlib.chdir(folder):
        return dry_run(write_script(folder, SCRIPT), capacity="512MiB", directory=folder / "out"), folder / "out"


def test_the_script_names_every_callback_there_is():
    public = {name: getattr(lightning_memtools, name) for name in lightning_memtools.__all__}
    callbacks = {name for name, one in public.items() if isinstance(one, type) and issubclass(one, Callback)}
    assert len(callbacks) == 10
    assert all(f"{name}(" in SCRIPT for name in callbacks)


def test_with_every_callback_at_once_it_ends_well_and_each_writes_its_report(everything):
    result, folder = everything
    assert result.status == 0, result.error
    reports = {path.name: path.read_text() for path in folder.rglob("memtools/*.md")}
    assert {"batch_size.md", "checkpoint_plan.md", "doctor.md", "memory_summary_fit.md"} <= set(reports)
    assert "Other processes on the device: none." in reports["memory_summary_fit.md"]
    assert "out-of-memory errors: 0" in reports["memory_summary_fit.md"]


def test_the_sizes_that_the_tuner_finds_fill_the_device_and_no_more(everything):
    result, folder = everything
    (page,) = folder.rglob("batch_size.md")
    train, val = map(int, re.search(r"train (\d+), val (\d+)", page.read_text()).groups())
    assert min(train, val) > 64
    (metrics,) = folder.rglob("metrics.csv")
    rows = list(csv.DictReader(io.StringIO(metrics.read_text())))
    for stage in ("train", "val"):
        peaks = [float(one) for row in rows if (one := row[f"memory/{stage}/peak_reserved_gib"])]
        assert 0.25 < max(peaks) <= 0.5
    (stage,) = (one for one in result.stages if one.stage == "train")
    assert 256 * MIB < stage.peak_reserved_bytes <= 512 * MIB
    # A step of the size that was found: those of the search have other sizes.
    assert 0 <= stage.bytes_by_category["inputs"] - train * 8 * 4 < 512
