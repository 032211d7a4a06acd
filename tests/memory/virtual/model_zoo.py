"""Small models with an input each, and one training step for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Make = Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]


def convolutions() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, groups=2),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return net, (torch.randn((4, 3, 24, 24)),)


def transformer_encoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (torch.randn((3, 10, 32)),)


class Attention(nn.Module):
    """Scaled dot product attention, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def attention() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Attention(), (torch.randn((2, 12, 32)),)


class Gru(nn.Module):
    """A recurrent cell, unrolled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(10, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 20)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


def gru_cell() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Gru(), (torch.randn((5, 4, 10)),)


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


PLAIN: dict[str, Make] = {
    make.__name__: make
    for make in (
        convolutions,
        transformer_encoder,
        attention,
        gru_cell,
        checkpointed,
        autocast,
    )
}


def train_step(model: nn.Module, inputs: tuple[torch.Tensor, ...], optimizer: torch.optim.Optimizer | None) -> Any:
    """One step: zero_grad after forward, as Lightning does it."""
    loss = model(*inputs).float().square().mean()
    if optimizer is not None:
        optimizer.zero_grad()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss.detach()
