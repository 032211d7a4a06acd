"""The rule for convolution workspaces, beside what cuDNN's heuristics say, and in an estimate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lightning_memtools import estimate_memory
from lightning_memtools._torch import KEEPS_CUBLAS_WORKSPACES
from tests.zoo import timm

MIB = 2**20


def test_reserved_memory_grows_as_with_cudnns_own_workspaces():
    # facts/convolution-workspaces.md: PyTorch's own allocator, batch 64, SGD with momentum, an A100.
    with torch.device("meta"):
        model = timm().create_model("resnet18")
    batch = torch.empty(64, 3, 224, 224, device="meta"), torch.empty(64, dtype=torch.long, device="meta")
    made = estimate_memory(
        model,
        batch,
        step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        capacity="A100 80GB",
    )
    # With a torch that keeps cuBLAS's workspaces, and the two segments of 20 MiB in which they lie.
    assert made.peak_reserved / MIB == pytest.approx(2070, rel=0.005 if KEEPS_CUBLAS_WORKSPACES else 0.02)
    total = made.peak_reserved + made.convolution_workspaces
    assert total / MIB == pytest.approx(2760, rel=0.05)
    assert "convolution workspaces, up to" in made.to_markdown()
    # They do not count where it is asked what fits.
    assert made.fits(f"{-(-made.peak_reserved // MIB)}MiB")
