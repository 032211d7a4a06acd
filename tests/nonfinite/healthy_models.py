"""Odd models whose values are finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lightning_models import Regression


class Expanded(Regression):
    """Buffers that are expanded, None at first, and registered in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(4))
        self.register_buffer("centre", None)

    def loss(self, batch):
        x, y = batch
        mean = x.detach().mean(0)
        self.centre = mean if self.centre is None else 0.9 * self.centre + 0.1 * mean
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(()))
        self.count += 1
        return nn.functional.mse_loss(self.net(x * self.scale - self.centre), y)


class OneGraph(Regression):
    """A GAN that sends one graph backward for two updates, through normalisation in evaluation mode."""

    automatic_optimization = False

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        normalized = nn.utils.spectral_norm(nn.Linear(1, 4))
        self.other, self.fused = nn.Sequential(normalized, nn.BatchNorm1d(4), nn.Linear(4, 1)), fused

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-3, fused=self.fused) for net in (self.net, self.other)]

    def training_step(self, batch, batch_idx):
        x, _ = batch
        self.other[1].eval()
        made = self.net(x)
        judged = self.other(made)
        first, second = self.optimizers()
        gradients = torch.autograd.grad(judged.square().mean(), list(self.other.parameters()), retain_graph=True)
        for parameter, gradient in zip(self.other.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.other[1].momentum = 0.1
        second.step()
        first.zero_grad()
        self.manual_backward(made.square().mean())
        first.step()


HEALTHY: dict[str, Any] = {
    "expanded": Expanded,
    "one graph": lambda: OneGraph(fused=False),
    "one graph, fused": lambda: OneGraph(fused=True),
}
