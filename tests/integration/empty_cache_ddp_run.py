"""Two ranks with different memory, started by test_empty_cache_ddp.py: rank 1 takes more, and leaks."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.empty_cache import EmptyCache
from lightning_memtools.memory.sizes import MIB
from tests.lightning_models import Regression, loader, trainer


class Uneven(Regression):
    """Leaves 10 MiB in the cache on rank 0 and 100 MiB on rank 1, which also keeps its validation outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.reserved_mib: list[float] = []

    def training_step(self, batch, batch_idx):
        torch.empty((100 if self.global_rank else 10) * MIB, dtype=torch.uint8)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        if self.global_rank:
            # More than what gloo's thread may still hold of a broadcast, some 512 bytes, or not.
            self.outputs.append(self.net(batch[0]).repeat(1, 4096))
        device = VirtualDevice.current()
        self.reserved_mib.append((device.stats().reserved or 0) / MIB)


def main(root: Path) -> None:
    L.seed_everything(0, verbose=False)
    # Before the device is there: data sets are host memory.
    train, val, test = loader(32, 8), loader(16, 8), loader(16, 8)
    with warnings.catch_warnings(record=True) as said, VirtualDevice("1GiB"):
        warnings.simplefilter("always")
        model = Uneven()
        logger = CSVLogger(root, name="", version="table")
        run = trainer(
            root,
            EmptyCache(min_reclaimable="50MiB"),
            strategy="ddp",
            devices=2,
            max_epochs=3,
            num_sanity_val_steps=0,
            logger=logger,
        )
        run.fit(model, train, val)
        run.test(model, test, verbose=False)
    texts = [str(warning.message) for warning in said if "in a row" in str(warning.message)]
    weights = [float(parameter.double().sum()) for parameter in model.parameters()]
    left = {"reserved_mib": model.reserved_mib, "warnings": texts, "weights": weights}
    (root / f"rank{run.global_rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
