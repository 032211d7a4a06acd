"""An estimate needs next to none of the memory that it speaks of."""

from __future__ import annotations

import resource

import torch
from torch import nn

from lightning_memtools import estimate_memory


def test_a_model_of_six_billion_parameters_is_estimated_in_less_than_a_gibibyte_of_host_memory():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True) for _ in range(32)])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters > 6e9
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    estimate = estimate_memory(
        model,
        torch.empty(1, 256, 4096, device="meta"),
        step=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
    )
    # Parameters, gradients, two moments, in float32.
    assert estimate.peak_allocated > 4 * 4 * parameters
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**30
