"""EmptyCache notices memory that rises from batch to batch before it fills the device; healthy runs stay silent."""

from __future__ import annotations

import re
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric

from lightning_memtools import EmptyCache, VirtualDevice
from lightning_memtools.memory.leaks.growth_watch import EVERY, GrowthWatch
from lightning_memtools.memory.stats import MemoryStats
from tests.event_files import scalars, texts_of
from tests.lightning_models import trainer

KIB = 2**10


class Small(L.LightningModule):
    """Keeps 16 KiB of each batch from some batch on."""

    def __init__(self, keeps_from: int | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(64, 64)
        self.keeps_from = keeps_from
        self.history: list[Tensor] = []
        self.n = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch)
        self.n += 1
        if self.keeps_from is not None and self.n > self.keeps_from:
            self.history.append(out.detach())
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StopsAt(L.Callback):
    def __init__(self, n: int) -> None:
        self.n = n

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.n


def warnings_of(root: Any, model: L.LightningModule, *callbacks: Any, n: int, epochs: int = 1,
                capacity: str = "16MiB") -> list[str]:  # fmt: skip
    data: Any = DataLoader(torch.ones(64 * n, 64), 64)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught, VirtualDevice(capacity):
        warnings.simplefilter("always")
        trainer(root, EmptyCache(), *callbacks, max_epochs=epochs, logger=False, limit_val_batches=0).fit(model, data)
    # The ledger of epochs, which counts those in a row, has tests of its own.
    return [str(one.message) for one in caught if "in each batch" in str(one.message)]


def test_a_history_that_begins_at_batch_51_is_named_before_it_fills_the_device_and_logged(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    data: Any = DataLoader(torch.ones(64 * 2000, 64), 64)
    run = trainer(tmp_path, EmptyCache(), StopsAt(420), logger=logger, max_epochs=1, limit_val_batches=0)
    with VirtualDevice("16MiB"), pytest.warns(UserWarning, match="in each batch") as said:
        run.fit(Small(keeps_from=50), data)
    # The ledger of epochs, which counts those in a row, has tests of its own.
    (text,) = [str(one.message) for one in said if "in each batch" in str(one.message)]
    assert "`Small.history`, a list of" in text
    assert re.search(r"(15\.9|16\.0) KiB in each batch", text)
    (full,) = re.findall(r"full at batch ([\d,]+)", text)
    # 16 MiB less what is there otherwise, in pieces of 16 KiB, after the first 50 batches.
    assert 950 < int(full.replace(",", "")) < 50 + 1024
    (noticed,) = re.findall(r"until batch (\d+)\.", text)
    assert int(noticed) <= 50 + 7 * EVERY
    ((step, found),) = scalars(logger.log_dir)["memory/leaks"]
    assert 50 + 5 * EVERY < step <= 50 + 7 * EVERY
    assert found == 1.0
    assert texts_of(logger.log_dir)["memtools/leak"] == [text]
    assert Path(logger.log_dir, "memtools", "leak.md").read_text() == text


class Healthy(Small):
    """Keeps on purpose: a ring, a ring made of a list, a queue, an average, a metric, and a cache that fills."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.ring: deque[Tensor] = deque(maxlen=30)
        self.list_ring: list[Tensor] = []
        self.register_buffer("queue", torch.zeros(128, 64))
        self.average: dict[str, Tensor] = {}
        self.metric = CatMetric()
        self.cache: dict[int, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch)
        self.ring.append(out.detach())
        self.list_ring = [*self.list_ring[-60:], out.detach().clone()]
        self.queue = torch.cat([self.queue[64:], out.detach()])
        self.average = {name: value.detach().clone() for name, value in self.named_parameters()}
        self.metric.update(out.detach().mean(1))
        # A new part of the samples is drawn in every epoch.
        self.cache.setdefault((self.current_epoch * 20 + batch_idx % 20), out.detach().clone())
        return out.square().mean()

    def on_train_epoch_end(self) -> None:
        self.metric.reset()


def test_rings_queues_averages_metrics_and_a_cache_that_fills_for_ten_epochs_are_healthy(tmp_path):
    assert warnings_of(tmp_path, Healthy(), n=60, epochs=10) == []


def test_growth_that_ends_with_its_epoch_and_fits_until_then_is_silent(tmp_path):
    class Collects(Small):
        def on_train_epoch_end(self) -> None:
            self.history.clear()

    assert warnings_of(tmp_path, Collects(keeps_from=0), n=450, epochs=2) == []


@pytest.mark.parametrize(
    ("levels", "is_steady"),
    [
        ([1000 + n for n in range(7)], False),  # too little beside what is allocated
        ([100 * n for n in range(1, 8)], True),
        ([100, 200, 300, 400, 400, 500, 600], False),
        ([100, 101, 300, 301, 500, 501, 700], False),  # by fits and starts
    ],
)
def test_only_a_steady_rise_counts(levels, is_steady):
    watch = GrowthWatch()
    steady = [watch.read(level * 1000, EVERY * at, 0) for at, level in enumerate(levels)]
    assert steady[:-1] == [False] * 6
    assert steady[-1] is is_steady


def test_the_batch_at_which_the_device_is_full_counts_what_a_step_takes_and_what_others_hold():
    watch = GrowthWatch()
    for at in range(7):
        watch.read(1000 + 100 * at, EVERY * at, 0)
    stats = MemoryStats(capacity=10_000, device_used=4000, reserved=3000, allocated=1600, peak_allocated=2600)
    growth = watch.growth(stats)
    assert growth.per_batch == 2.0
    assert growth.n_left == (10_000 - 1000 - 2600) // 2
