"""Silence on healthy code: real models and usual training loops bring no finding of severity warning or above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_memtools.doctor.diagnosing import diagnose
from tests.doctor.specimens import LANGUAGE_MODELS, language_model, network, rows, serious, squared
from tests.zoo import timm

STEPS = 8


def images(size: int = 32) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 3, size, size), torch.tensor([0, 1, 2, 3])) for _ in range(2)]


def classify(model: nn.Module, batch: Any) -> Any:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1])


def assert_healthy(
    model: nn.Module, batches: Any, step: Callable[[nn.Module, Any], Tensor] | None, optimizer: Any = None
) -> None:
    if optimizer is None and step is not None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.05)
    report = diagnose(model, batches, optimizer, step=step, val_dataloader=batches, steps=STEPS,
                      evaluate=None if step is None else evaluation(step))  # fmt: skip
    assert not serious(list(report.findings))
    assert report.steps == STEPS


def evaluation(step: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    @torch.no_grad()
    def evaluate(model: nn.Module, batch: Any) -> Any:
        return step(model.eval(), batch)

    return evaluate


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "convnext_atto", "mixer_s32_224", "resnet10t", "regnetx_002", "ghostnetv2_100"]
)
def test_timm(name):
    torch.manual_seed(0)
    sized = {"img_size": 32} if name.startswith(("vit", "mixer")) else {}
    model = timm().create_model(name, num_classes=4, **sized)
    assert_healthy(model, images(64 if name == "ghostnetv2_100" else 32), classify)


def tokens() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 60, (4, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "labels": ids}, {"input_ids": ids.flip(0), "labels": ids.flip(0)}]


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_transformers(kind):
    torch.manual_seed(0)
    assert_healthy(language_model(kind).train(), tokens(), lambda model, batch: model(**batch).loss)


def test_an_exponential_moving_average_beside_the_model():
    model = network(norm=True)
    both = nn.ModuleDict({"net": model, "average": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))})

    def step(both: Any, batch: Any) -> Any:
        if both.training:
            both["average"].update_parameters(both["net"])
        return squared(both["net"], batch)

    assert_healthy(both, rows(), step, torch.optim.Adam(model.parameters(), weight_decay=0.1))


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank whose second matrix begins at zero, as in LoRA."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.down, self.up = (
            nn.Linear(layer.in_features, rank, bias=False),
            nn.Linear(rank, layer.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + self.up(self.down(x))


def test_adapters_of_low_rank():
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(nn.Linear(4, 8)), nn.Tanh(), Adapted(nn.Linear(8, 3)), nn.Linear(3, 1))
    assert_healthy(model, rows(), squared)


def test_a_variational_autoencoder_with_its_sum_per_sample():
    torch.manual_seed(0)
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "decoder": nn.Linear(2, 4)})

    def step(model: Any, batch: Any) -> Any:
        mean, spread = model["encoder"](batch[0]).chunk(2, dim=1)
        out = model["decoder"](mean + torch.randn_like(mean) * torch.exp(spread / 2))
        divergence = -0.5 * torch.sum(1 + spread - mean**2 - spread.exp())
        return (F.mse_loss(out, batch[0], reduction="sum") + divergence) / len(batch[0])

    assert_healthy(model, rows(), step)
