"""What a traced step draws and caches outside of the model, and the real run after it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_memtools import GradientCheckpointing
from lightning_memtools.estimate import estimate_memory
from tests.lightning_models import Regression, loader, trainer

TORCH = torch.Generator()
PYTHON = random.Random()  # noqa: S311


@functools.lru_cache
def positions(n: int, width: int) -> Tensor:
    return torch.linspace(0, 1, n * width).view(n, width)


def drawn() -> float:
    return PYTHON.random()


class Block(nn.Module):
    """Adds its layer's result and what a subclass gives."""

    def __init__(self, own: Any = None) -> None:
        super().__init__()
        self.layer, self.out, self.own = nn.Linear(16, 64), nn.Linear(64, 16), own

    def forward(self, x):
        return x + self.out(self.layer(x + self.more(x)).relu())

    def more(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Cached(Block):
    def more(self, x):
        return positions(*x.shape)


class TorchGlobal(Block):
    def more(self, x):
        return torch.randn(x.shape, generator=TORCH)


class PythonGlobal(Block):
    def more(self, x):
        return x * drawn()


def numpy_in_closure() -> type[Block]:
    generator = np.random.default_rng(3)

    class NumpyClosure(Block):
        def more(self, x):
            return x * generator.random()

    return NumpyClosure


KINDS: dict[str, Callable[[], Callable[[], Block]]] = {
    "a cached function": lambda: Cached,
    "a global torch.Generator": lambda: TorchGlobal,
    "a global random.Random that a function draws from": lambda: PythonGlobal,
    "a numpy Generator in a closure": numpy_in_closure,
}


def seeded() -> None:
    torch.manual_seed(1)
    TORCH.manual_seed(3)
    PYTHON.seed(3)
    positions.cache_clear()


def losses_of_fit(kind: str, root: Any, *callbacks: Any) -> list[float]:
    seeded()
    block, model = KINDS[kind](), Regression()
    model.net = nn.Sequential(nn.Linear(4, 16), *(block() for _ in range(4)), nn.Linear(16, 1))
    trainer(root, *callbacks, logger=False).fit(model, loader(1024, 512))
    return model.train_losses


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_with_a_plan_is_the_plain_one(kind, tmp_path):
    plain = losses_of_fit(kind, tmp_path)
    checkpointing = GradientCheckpointing()
    assert losses_of_fit(kind, tmp_path, checkpointing) == plain
    assert checkpointing.plan.chains


def test_an_estimate_keeps_a_cache_that_it_did_not_add_to():
    seeded()
    known = positions(5, 16)
    estimate_memory(Cached(), torch.ones(5, 16), step=lambda model, x: model(x).sum())
    assert positions(5, 16) is known
    estimate_memory(Cached(), torch.ones(6, 16), step=lambda model, x: model(x).sum())
    assert positions.cache_info().currsize == 0
