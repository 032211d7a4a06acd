"""Checks on PyTorch's CUDA code, and silence about values that a dry run does not compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.doctor.specimens import found, network, only, rows, serious

pytestmark = pytest.mark.cuda_memory


def test_a_healthy_model_brings_remarks_on_reproducibility_only():
    model = network(norm=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    assert {one.check for one in found(model, rows(), optimizer=optimizer, steps=12)} <= {"reproducibility"}


def test_module_cuda_moves_in_place_and_a_submodule_that_is_exchanged_afterwards_stays_behind():
    """The row of SOURCES.md; a tensor is left behind in test_fixes.py."""
    model = network()
    model.cuda()  # not assigned, and rightly so
    assert not serious(found(model, rows()))
    model[2] = nn.Linear(8, 1)
    findings = found(model, rows(), lambda m, batch: m[2](m[:2](batch[0]).cpu()).mean())
    finding = only(findings, "devices")
    assert (finding.severity, finding.place) == ("warning", "2.weight, 2.bias")
    assert "2 tensors are not on cuda:0 like the model: 2.weight is on cpu" in finding.evidence
