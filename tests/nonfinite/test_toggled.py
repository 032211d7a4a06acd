"""GANs that toggle which parameters require gradients, as Lightning's own pages show it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memtools import replay
from lightning_memtools.nonfinite.causes import NonFiniteCause
from tests.nonfinite.observe import error_at_halt

BAD = 2


class ToggledGAN(L.LightningModule):
    """Two updates in a step; `fails` says which of them takes the log of 0."""

    def __init__(self, *, way: str = "toggle_optimizer", fails: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.fixed = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def losses(self, batch: Any) -> Any:
        amount = self.fixed(batch).square().mean() * 0 + batch.abs().sum(1)
        for index in range(2):
            made = self.generator(batch)
            loss = self.critic(made).mean() if index == 0 else self.critic(made.detach()).square().mean()
            yield loss * torch.log(amount).mean() if index == self.hparams["fails"] else loss

    def training_step(self, batch):
        losses = self.losses(batch)
        for optimizer in self.optimizers():
            if self.hparams["way"] == "toggle_model":
                with optimizer.toggle_model():
                    self._update(optimizer, next(losses))
            else:
                self.toggle_optimizer(optimizer)
                self._update(optimizer, next(losses))
                self.untoggle_optimizer(optimizer)

    def _update(self, optimizer: Any, loss: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.generator, self.critic)]


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("way", ["toggle_optimizer", "toggle_model"])
def test_a_failing_update_of_a_toggling_gan_is_explained_and_replayed(way, fails, tmp_path):
    batches: Any = list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0)))
    batches[BAD][3] = 0.0
    L.seed_everything(0, verbose=False)
    model = ToggledGAN(way=way, fails=fails)
    flags = {name: each.requires_grad for name, each in model.named_parameters()}
    error = error_at_halt(model, batches, tmp_path)
    assert error.step == BAD
    assert error.explanation.operation == "aten.log"
    assert error.cause == NonFiniteCause.DOMAIN
    assert {name: each.requires_grad for name, each in model.named_parameters()} == flags, "not mid-toggle"
    assert error.step_path is not None
    again = replay(error.step_path, model=ToggledGAN)
    assert not again.is_finite
    assert again.explanation.operation == "aten.log"
    assert again.exact, again.mismatches
