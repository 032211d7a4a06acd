"""A small module whose loss is given, and batches of which one can be made bad."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import nn

N, D, BAD = 6, 4, 2
Loss = Callable[[Any, Any], Any]


class Net(L.LightningModule):
    """A linear layer, and a loss and an optimizer that are given."""

    def __init__(self, loss: Loss, optimizer: Callable[[Any], Any] | None = None, **parts: Any) -> None:
        super().__init__()
        self.net, self.loss = nn.Linear(D, D), loss
        self.optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
        for name, part in parts.items():
            setattr(self, name, part)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self, batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def bad_line(thing: Any) -> int:
    """The number of the line of a function or class that ends with `# bad`."""
    lines, first = inspect.getsourcelines(thing)
    (number,) = (first + i for i, line in enumerate(lines) if line.rstrip().endswith("# bad"))
    return int(number)


def batches(**more: Callable[[int], Any]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    made = [{"x": torch.randn(N, D, generator=generator)} for _ in range(4)]
    return [batch | {name: make(index) for name, make in more.items()} for index, batch in enumerate(made)]
