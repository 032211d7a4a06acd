"""Published measurements: what NVML showed of real training runs, and the same runs estimated."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memtools.memory.sizes import GpuShape, find_gpu
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


# The GPU of these runs, on whose multiprocessors the workspaces of reductions depend.
MEASURED_ON = GpuShape.of(find_gpu("RTX 3060"))


def model_of(run: dict[str, Any]) -> nn.Module:
    """The model of a run, on the current device."""
    name, _, arguments = run["model"].partition("(")
    models = torchvision_models()
    made: nn.Module = models.MNASNet(1.0, num_classes=10) if arguments.startswith("1.0") else getattr(models, name)()
    return made


def predicted_reserved(run: dict[str, Any], gpu: GpuShape = MEASURED_ON) -> int:
    """The reserved peak of a run, as it was set up: three steps, HuggingFace's order, gradients clipped."""
    with torch.device("meta"):
        model = model_of(run)
    size = run["batch_size"]
    batch = torch.empty(size, 3, 86, 86, device="meta"), torch.empty(size, dtype=torch.long, device="meta")
    subject = Subject(model=model, step=classify, optimizer=partial(getattr(torch.optim, run["optimizer"]), lr=1e-3))
    recipe = Recipe(precision=Precision.parse("32-true"), steps=3, clip=1.0, zero_grad="after_step")
    traced = trace(subject, batch, recipe, SimulationSettings(cuda=True, cublas_workspace="8519680B", gpu=gpu))
    peak = traced.device.stats().peak_reserved
    assert peak is not None
    return peak


def real_reserved(run: dict[str, Any]) -> int:
    """The same with PyTorch's own CUDA allocator."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # of an earlier run in this process
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        model = model_of(run)
    model.to_empty(device="cpu").to("cuda")  # parameter after parameter, without a page of the host
    parameters = list(model.parameters())
    optimizer = getattr(torch.optim, run["optimizer"])(parameters, lr=1e-3)
    size = run["batch_size"]
    host = torch.empty(size, 3, 86, 86), torch.empty(size, dtype=torch.long)
    for _ in range(3):
        batch = tuple(one.to("cuda") for one in host)
        loss = classify(model, batch)
        loss.backward()
        loss = loss.detach()
        del batch
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_reserved()
