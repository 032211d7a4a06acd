"""device="cpu" is byte for byte what a VirtualDevice shows of real tensors."""

from __future__ import annotations

from functools import partial
from typing import get_args

import pytest
import torch
from torch import nn

from lightning_memtools.estimate import estimate_memory
from lightning_memtools.simulation.step_runner import PrecisionName
from tests.estimate.networks import (
    Checkpointed,
    Classifier,
    Decoder,
    Encoder,
    Gan,
    Residual,
    UNet,
    classify,
    images,
    mlp,
    next_token,
    total,
)
from tests.estimate.real_runs import peaks_of_fit, peaks_of_real_run
from tests.zoo import torchvision_models

TOKENS = torch.zeros(3, 20, dtype=torch.long)
ADAM = torch.optim.Adam
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FOREACH = partial(torch.optim.AdamW, foreach=True)


def vision(name):
    return lambda: getattr(torchvision_models(), name)(num_classes=10)


MODELS = {
    "mlp": (lambda: mlp(40, 90, 30), torch.zeros(7, 40), total, ADAM),
    "residual": (Residual, torch.zeros(9, 128), total, MOMENTUM),
    "decoder with tied embeddings": (Decoder, TOKENS, next_token, FOREACH),
    "encoder": (Encoder, torch.zeros(2, 16, 32), total, ADAM),
    "u-net": (UNet, torch.zeros(2, 3, 16, 16), total, MOMENTUM),
    "checkpointed": (partial(Checkpointed, use_reentrant=False), torch.zeros(16, 64), total, ADAM),
    "resnet18": (vision("resnet18"), images(), classify, MOMENTUM),
    "mobilenet_v3_small": (vision("mobilenet_v3_small"), images(), classify, ADAM),
    "convnext_tiny": (vision("convnext_tiny"), images(2, 32), classify, ADAM),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_estimate_for_the_cpu_is_the_real_run(name):
    build, batch, step, optimizer = MODELS[name]
    model = build()
    estimate = estimate_memory(model, batch, step=step, optimizer=optimizer, device="cpu")
    assert (estimate.peak_allocated, estimate.peak_reserved) == peaks_of_real_run(model, batch, step, optimizer)


@pytest.mark.parametrize("precision", get_args(PrecisionName))
def test_precision_accumulation_and_clipping_are_those_of_the_real_run(precision):
    model, rows = mlp(64, 256, 64), torch.zeros(32, 64)
    options = {"accumulate": 3, "clip": 1.0, "steps": 3, "precision": precision}
    estimate = estimate_memory(model, rows, step=total, optimizer=ADAM, device="cpu", **options)
    assert (estimate.peak_allocated, estimate.peak_reserved) == peaks_of_real_run(model, rows, total, ADAM, **options)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_lightning_module_takes_what_its_fit_takes(precision):
    module = Classifier()
    batch = torch.zeros(128, 32), torch.zeros(128, dtype=torch.long)
    estimate = estimate_memory(module, batch, device="cpu", precision=precision)
    assert (estimate.peak_allocated, estimate.peak_reserved) == peaks_of_fit(module, batch, precision=precision)


def test_manual_optimization_takes_what_its_fit_takes():
    module, batch = Gan(), torch.zeros(64, 64)
    estimate = estimate_memory(module, batch, device="cpu")
    assert (estimate.peak_allocated, estimate.peak_reserved) == peaks_of_fit(module, batch)


def test_an_estimate_takes_no_step_of_an_optimizer_under_a_scheduler() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps `step` on the instance
    before = model.weight.detach().clone()
    with_one = estimate_memory(model, torch.ones(8, 4), step=lambda m, x: m(x).sum(), optimizer=optimizer)
    assert not optimizer.state
    assert torch.equal(model.weight, before)
    without = estimate_memory(model, torch.ones(8, 4), step=lambda m, x: m(x).sum(), optimizer=torch.optim.Adam)
    assert with_one.peak_allocated == without.peak_allocated
    del scheduler
