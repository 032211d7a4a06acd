"""What a careful user met: a batch as long as a layer is wide, and an optimizer that searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_memtools.nonfinite.bad_step import NonFiniteError
from tests.nonfinite.observe import error_at_halt

WIDTH = BATCH = 8


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.body(batch), batch_idx)

    def loss(self, x: Tensor, batch_idx: int) -> Tensor:
        return x.square().mean() - float(batch_idx == 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def halted(model: L.LightningModule, root: Path) -> NonFiniteError:
    L.seed_everything(0, verbose=False)
    batches = [torch.randn(BATCH, WIDTH) for _ in range(4)]
    return error_at_halt(model, batches, root, directory=str(root))


class NarrowLayer(Net):
    """One unit of the layer is 0, in all samples; there are as many units as samples."""

    def loss(self, x: Tensor, batch_idx: int) -> Tensor:
        units = x.square().mean(0) * torch.tensor([1.0, 1, 1, float(batch_idx < 2), 1, 1, 1, 1])
        return units.log().mean()


def test_a_unit_is_not_called_a_sample_where_there_are_as_many(tmp_path):
    error = halted(NarrowLayer(), tmp_path)
    assert error.explanation.operation == "aten.log"
    assert error.explanation.samples == ()


class Searches(Net):
    """Its optimizer evaluates the loss several times in a step; the second evaluation is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.n_evaluations = 0

    def loss(self, x: Tensor, batch_idx: int) -> Tensor:
        self.n_evaluations = self.n_evaluations + 1 if batch_idx == 2 else 0
        return x.square().mean() * (torch.nan if self.n_evaluations == 2 else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


def test_the_weights_that_an_optimizer_has_moved_within_its_step_are_not_claimed(tmp_path):
    error = halted(Searches(), tmp_path)
    assert error.step == 2
    assert "that evaluations of the loss in this step have moved" in str(error)
