"""Published measurements: what NVML showed of real training runs, and the same runs estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memtools.memory.sizes import GpuShape, find_gpu
from lightning_memtools.simulation.step_runner import Recipe
from lightning_memtools.simulation.tracer import SimulationSettings, Subject, trace
from tests.estimate.networks import classify
from tests.zoo import torchvision_models

SHARED = Path(__file__).parents[3] / "shared" / "data" / "published-peaks.json"


def runs():
    if not SHARED.is_file():
        pytest.skip("shared/data/published-peaks.json is not here")
    return json.loads(SHARED.read_text())["runs"]


# The GPU of these runs, on whose multiprocessors the workspaces of reductions depend.
MEASURED_ON = GpuShape.of(find_gpu("RTX 3060"))


def model_of(run):
    """The model of a run, on the current device."""
    name, _, arguments = run["model"].partition("(")
    models = torchvision_models()
    return models.MNASNet(1.0, num_classes=10) if arguments.startswith("1.0") else getattr(models, name)()


class InTheirOrder(L.LightningModule):
    """Trains as HuggingFace's Trainer does, as these runs were: gradients are zeroed after the optimizer's step."""

    def __init__(self, model: nn.Module, optimizer: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.name = model, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = classify(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.name)(self.parameters(), lr=1e-3)


def predicted_reserved(run: dict[str, Any], gpu: GpuShape = MEASURED_ON) -> int:
    """The reserved peak of a run, as it was set up: three steps, gradients clipped."""
    with torch.device("meta"):
        model = InTheirOrder(model_of(run), run["optimizer"])
    size = run["batch_size"]
    batch = torch.empty(size, 3, 86, 86, device="meta"), torch.empty(size, dtype=torch.long, device="meta")
    settings = SimulationSettings(cuda=True, cublas_workspace="8519680B", gpu=gpu)
    peak = trace(Subject(model=model), batch, Recipe(steps=3), settings).device.stats().peak_reserved
    assert peak is not None
    return peak
