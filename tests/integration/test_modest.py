"""DESIGN rule 8: with default arguments the callbacks together add next to nothing."""

from __future__ import annotations

import lightning as L
from torch import nn

from lightning_memtools import VirtualDevice, default_callbacks
from lightning_memtools.memory.peaks import peak_counter
from tests.lightning_models import Regression, loader, trainer


class Deep(Regression):
    """Some 20 MiB at the peak."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(4, 512), *layers, nn.Linear(512, 1))

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def peak_of_a_run(root, *callbacks: L.Callback) -> int:
    with VirtualDevice() as device:
        L.seed_everything(0, verbose=False)
        whole = peak_counter(device).open()
        whole.resume()
        # The default interval: 50 steps lie between two points, and their losses are kept until then.
        run = trainer(root, *callbacks, log_every_n_steps=50, max_epochs=1)
        run.fit(Deep(), loader(64 * 60, 64), loader(256, 64))
        whole.pause()
    assert whole.allocated is not None
    return whole.allocated


def test_all_default_callbacks_add_at_most_half_a_percent_and_one_batch_to_the_peak(tmp_path):
    plain, watched = peak_of_a_run(tmp_path), peak_of_a_run(tmp_path, *default_callbacks())
    batch = 2 * 512 + 64 * 4 * 4 + 64 * 4
    assert plain > 15 * 2**20
    assert plain <= watched <= 1.005 * plain + batch
