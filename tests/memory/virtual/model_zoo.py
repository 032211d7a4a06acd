"""Small models with an input each, and one training step for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.checkpointing.models import SMALL

Make = Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]


class Checkpointed(nn.Module):
    """Two segments, recomputed in backward; one kind of checkpoint each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(20, 80), nn.GELU(), nn.Linear(80, 20))
        self.second = nn.Sequential(nn.Linear(20, 80), nn.GELU(), nn.Linear(80, 20))

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.second, x, use_reentrant=True)


def checkpointed() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Checkpointed(), (torch.randn((7, 20)),)


class HalfPrecision(nn.Module):
    """An autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out: torch.Tensor = self.layers(x).softmax(-1)
        return out


def autocast() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return HalfPrecision(), (torch.randn((9, 16)),)


def same(name: str) -> Make:
    make, shape = SMALL[name]
    return lambda: (make(), (torch.randn(shape),))


PLAIN: dict[str, Make] = {name: same(name) for name in ("conv_bn_relu", "encoder")}
PLAIN |= {make.__name__: make for make in (checkpointed, autocast)}


def train_step(model: nn.Module, inputs: tuple[torch.Tensor, ...], optimizer: torch.optim.Optimizer | None) -> Any:
    """One step: zero_grad after forward, as Lightning does it."""
    loss = model(*inputs).float().square().mean()
    if optimizer is not None:
        optimizer.zero_grad()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss.detach()
