"""Published measurements: what NVML showed of real training runs, and the same runs estimated."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memtools.memory.sizes import find_gpu
from lightning_memtools.simulation.cuda_ops.reductions import GpuShape
from lightning_memtools.simulation.step import Precision, Recipe
from lightning_memtools.simulation.tracer import SimulationSettings, Subject, trace
from tests.estimate.networks import classify
from tests.zoo import torchvision_models

SHARED = Path(__file__).parents[3] / "shared" / "data" / "published-peaks.json"


def runs() -> list[dict[str, Any]]:
    if not SHARED.is_file():
        pytest.skip("shared/data/published-peaks.json is not here")
    found: list[dict[str, Any]] = json.loads(SHARED.read_text())["runs"]
    return found


def predicted_reserved(run: dict[str, Any]) -> int:
    """The reserved peak of a run, as it was set up: three steps, HuggingFace's order, gradients clipped."""
    name, _, arguments = run["model"].partition("(")
    models = torchvision_models()
    with torch.device("meta"):
        model = models.MNASNet(1.0, num_classes=10) if arguments.startswith("1.0") else getattr(models, name)()
    size = run["batch_size"]
    batch = torch.empty(size, 3, 86, 86, device="meta"), torch.empty(size, dtype=torch.long, device="meta")
    subject = Subject(model=model, step=classify, optimizer=partial(getattr(torch.optim, run["optimizer"]), lr=1e-3))
    recipe = Recipe(precision=Precision.parse("32-true"), steps=3, clip=1.0, zero_grad="after_step")
    # The GPU of these runs, on whose multiprocessors the workspaces of reductions depend.
    gpu = GpuShape.of(find_gpu("RTX 3060"))
    traced = trace(subject, batch, recipe, SimulationSettings(cuda=True, cublas_workspace="8519680B", gpu=gpu))
    peak = traced.device.stats().peak_reserved
    assert peak is not None
    return peak
