"""Odd models whose values are finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lightning_models import Regression


class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(1))


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


class TwoUpdates(Regression):
    """Two optimizers in manual optimization, for `net` and `other`."""

    automatic_optimization = False

    def __init__(self, other: nn.Module, *, fused: bool) -> None:
        super().__init__()
        self.other, self.fused = other, fused

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-3, fused=self.fused) for net in (self.net, self.other)]


class OneGraph(TwoUpdates):
    """A GAN that sends one graph backward for two updates, through normalisation in evaluation mode."""

    def __init__(self, *, fused: bool) -> None:
        normalized = nn.utils.spectral_norm(nn.Linear(1, 4))
        super().__init__(nn.Sequential(normalized, nn.BatchNorm1d(4), nn.Linear(4, 1)), fused=fused)

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


class BufferInGraph(TwoUpdates):
    """The graph of the first update needs a buffer again for the second."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__(nn.Linear(4, 1), fused=fused)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        shared = (self.net(x) + self.other(x)).mean() + (self.scale * self.other.weight).square().mean()
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(shared, retain_graph=True, inputs=list(self.net.parameters()))
        first.step()
        # The second backward reads `scale` and the weights of `other`, neither of which the first update writes.
        self.manual_backward((self.scale * self.other.weight).square().mean())
        second.step()


class Shared(BufferInGraph):
    """As above, with one graph for both updates: nothing may write the buffer in between."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        regular = (self.scale * self.other.weight * self.scale).square().mean() + self.other.bias.square().mean()
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.net(x).square().mean())
        first.step()
        second.zero_grad()
        self.manual_backward(regular)
        second.step()


HEALTHY: dict[str, Any] = {
    "lazy": Lazy,
    "expanded": Expanded,
    **{
        f"{kind.__name__}, fused={fused}": lambda kind=kind, fused=fused: kind(fused=fused)
        for kind in (OneGraph, BufferInGraph, Shared)
        for fused in (False, True)
    },
}
