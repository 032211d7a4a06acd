"""`estimate_memory` by simulation and on PyTorch's own CUDA code: processor time, and whether the figures are equal.

Needs PyTorch's CUDA build; no GPU:

    python -m lightning_memtools.null_cuda --gpu "A100 80GB" benchmarks/estimate_engines.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from machine import save
from torch import nn

from lightning_memtools.estimate import MemoryEstimate, estimate_memory
from tests.zoo import timm, torchvision_models

BATCH = 8
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": lambda: torchvision_models().resnet50(),
    "DenseNet-121": lambda: torchvision_models().densenet121(),
    "ViT-B/16": lambda: torchvision_models().vit_b_16(),
    "HRNet-W18": lambda: timm().create_model("hrnet_w18"),
}


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a classifier."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def timed(model: nn.Module, engine: Any) -> tuple[float, MemoryEstimate]:
    """The processor time of an estimate, in seconds, and the estimate."""
    batch = torch.empty(BATCH, 3, 224, 224, device="meta"), torch.empty(BATCH, dtype=torch.long, device="meta")
    start = time.process_time()
    made = estimate_memory(
        model, batch, step=step, optimizer=partial(torch.optim.AdamW, foreach=True), capacity="A100 80GB", engine=engine
    )
    return time.process_time() - start, made


def main() -> None:
    """Measure, print and write results/estimate_engines.json."""
    with torch.device("meta"):
        small = nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 10))
    for engine in ("simulation", "cuda"):  # imports, and what torch prepares at first
        timed(small, engine)
    found = {}
    for name, build in MODELS.items():
        with torch.device("meta"):
            model = build()
        (simulation_s, simulated), (cuda_s, real) = (timed(model, engine) for engine in ("simulation", "cuda"))
        found[name] = {
            "simulation_s": round(simulation_s, 2),
            "cuda_s": round(cuda_s, 2),
            "ratio": round(simulation_s / cuda_s, 1),
            "allocated_equal": real.peak_allocated == simulated.peak_allocated,
            "reserved_equal": real.peak_reserved == simulated.peak_reserved,
        }
        print(name, found[name], flush=True)
    save("estimate_engines", {"batch": BATCH, "optimizer": "AdamW", "processor_time": found})


if __name__ == "__main__":
    main()
