"""Models to checkpoint, and the harshest plans for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_memtools.checkpointing.apply_plan import ChainPlan, Range
from lightning_memtools.checkpointing.chains import find_chains, is_within, outermost
from lightning_memtools.checkpointing.checkpoint_options import BnDropout, CheckpointOptions


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


def mlp(width: int = 32) -> nn.Sequential:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU(inplace=True), nn.Dropout(0.3))]
    return nn.Sequential(*hidden, nn.Linear(width, 4))


def conv_bn_relu(width: int = 8, depth: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Conv2d(width if i else 3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def encoder(depth: int = 3, dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(*[Block(32, 4, dropout) for _ in range(depth)])


def nested() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, 32),
        nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.GELU()), nn.Linear(32, 32)),
        nn.Sequential(nn.Sequential(nn.BatchNorm1d(32), nn.ReLU()), nn.Linear(32, 4)),
    )


def shared() -> nn.Sequential:
    twice = nn.Linear(32, 32)
    norm = nn.BatchNorm1d(32)
    return nn.Sequential(twice, norm, nn.Tanh(), twice, norm, nn.Dropout(0.1), twice)


# How to make each model, and the shape of a batch for it.
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6, 32)),
    "conv_bn_relu": (conv_bn_relu, (3, 3, 8, 8)),
    "encoder": (encoder, (2, 10, 32)),
    "nested": (nested, (6, 32)),
    "shared": (shared, (6, 32)),
}


def harshest(model: nn.Module, *, bn_dropout: BnDropout, depth: int = 0) -> list[ChainPlan]:
    """Recompute all layers of the Sequentials at one depth of nesting, from the first one that may run twice.

    A range does not begin with a layer that writes to its input.
    """
    chains = find_chains(model, CheckpointOptions.parse(bn_dropout=bn_dropout))
    inner = [one for one in chains if any(one is not other and is_within(one.name, other.name) for other in chains)]
    found = []
    for chain in inner if depth and inner else outermost(chains):
        ranges, first = [], 0
        while first < len(chain.layers):
            last = first
            while last < len(chain.layers) and last not in chain.outside:
                last += 1
            while first < last and getattr(model.get_submodule(chain.layers[first]), "inplace", False):
                first += 1
            if first < last:
                ranges.append(Range(first, last))
            first = max(last, first + 1)
        found.append(ChainPlan(chain.name, chain.layers, tuple(ranges)))
    return found


def same_seed(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()
