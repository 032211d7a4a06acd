"""Kinds of models and optimizers that GradientCheckpointing plans, trained by a Trainer bit for bit as without it."""

from __future__ import annotations

import re

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memtools import GradientCheckpointing
from tests.lightning_models import trainer
from tests.zoo import torchvision_models


class Trained(pl.LightningModule):
    """Layers, and a step in the way of a test."""

    def __init__(self, layers: nn.Module, optimizer: str = "AdamW", batch_size: int = 256) -> None:
        super().__init__()
        self.layers, self.optimizer, self.batch_size = layers, optimizer, batch_size

    def training_step(self, batch, batch_idx):
        return self.step(batch).square().mean()

    def step(self, x):
        return self.layers(x)

    def configure_optimizers(self):
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(512, 8, 32), self.batch_size)


class Recurrent(Trained):
    def step(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x


class Detecting(Trained):
    """It chooses a size at random, and sorts, selects and drops boxes by scores that nobody knows."""

    def __init__(self) -> None:
        build = torchvision_models().detection.fasterrcnn_resnet50_fpn
        super().__init__(build(weights=None, weights_backbone=None, num_classes=5, min_size=96, max_size=128))

    def training_step(self, batch, batch_idx):
        return sum(self.layers(*batch).values())

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        boxes = torch.tensor([[10.0, 10, 60, 70], [40, 40, 120, 110]])
        images = [torch.rand(3, 128, 128, generator=generator) for _ in range(2)]
        batch = images, [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]
        return torch.utils.data.DataLoader([batch] * 2, batch_size=None, collate_fn=lambda one: one)


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


COVERED = {
    "NAdam": lambda: Trained(nn.Sequential(*[feed_forward() for _ in range(6)]), "NAdam"),
    "recurrent layers": lambda: Recurrent(nn.ModuleList(nn.GRU(32, 32) for _ in range(3))),
    "a detector": Detecting,
}
# torchvision's own operators run on a CUDA build of torch only.
ON_CUDA = [pytest.mark.cuda_memory, pytest.mark.filterwarnings("ignore:GPU available but not used")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=ON_CUDA if name == "a detector" else []) for name in COVERED]
)
def test_it_is_planned_and_trained_bit_for_bit(name, tmp_path):
    weights = []
    for callbacks in ([], [GradientCheckpointing(bn_dropout="recompute")]):
        torch.manual_seed(0)
        module = COVERED[name]()
        trainer(tmp_path, *callbacks, logger=False).fit(module)
        weights.append(module.state_dict())
    plan = callbacks[0].plan
    assert plan.refused is None
    assert plan.planned.activation_bytes < (0.98 if name == "a detector" else 0.75) * plan.plain.activation_bytes
    assert all(torch.equal(one, other) for one, other in zip(*(w.values() for w in weights), strict=True))


def test_where_nothing_is_gained_one_line_says_so_and_nothing_changes(tmp_path, capsys):
    class Seen(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            assert not [name for name, part in pl_module.named_modules() if "forward" in vars(part)]

    weights = []
    for callbacks in ([], [GradientCheckpointing(), Seen()]):
        torch.manual_seed(0)
        module = Trained(nn.Sequential(feed_forward(), feed_forward()), batch_size=1)
        trainer(tmp_path, *callbacks, logger=False, limit_train_batches=3).fit(module)
        weights.append(nn.utils.parameters_to_vector(module.parameters()))
    assert torch.equal(*weights)
    assert callbacks[0].plan.refused is not None
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"GradientCheckpointing: Nothing is recomputed\. No plan lowers the predicted peak of .*.iB", said)
    assert "left out" not in said, "the rest is in the report only"
