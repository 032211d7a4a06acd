"""Checks of devices and of memory on PyTorch's CUDA code, and silence about values that a dry run does not compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.doctor.specimens import found, network, only, rows, serious, squared

pytestmark = pytest.mark.cuda_memory

MIB = 2**20


class Scaled(nn.Module):
    """Multiplies by a tensor that it has as a plain attribute, so that `cuda()` does not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.moves = network(), torch.ones(4), False

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x * (self.scale.to(x.device) if self.moves else self.scale))


def test_a_healthy_model_brings_remarks_on_reproducibility_only():
    model = network(norm=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    findings = found(model, rows(), optimizer=optimizer, steps=12)
    assert {one.check for one in findings} <= {"reproducibility"}


def test_a_submodule_left_on_another_device_is_found():
    model = network().cuda()
    model[2] = nn.Linear(8, 1)  # exchanged after the move, as when a head is replaced
    findings = found(model, rows(), lambda m, batch: m[2](m[:2](batch[0]).cpu()).mean())
    finding = only(findings, "devices")
    assert (finding.severity, finding.place) == ("warning", "2.weight, 2.bias")
    assert "not on cuda:0, where the others are: 2.weight is on cpu" in finding.evidence
    assert not serious(found(model.cuda(), rows()))


def test_a_buffer_left_on_another_device_is_found():
    model = network().cuda()
    model[0].register_buffer("scale", torch.ones(3))
    assert only(found(model, rows()), "devices").place == "0.scale"
    assert not serious(found(model.cuda(), rows()))


def test_a_plain_tensor_left_on_another_device_is_found_beside_the_step_that_fails():
    findings = found(Scaled().cuda(), rows())
    assert [(one.check, one.severity) for one in findings if one.is_serious] == [("step", "error")]
    device = next(one for one in findings if one.check == "devices")
    assert (device.severity, device.place) == ("info", "scale")
    assert "scale is on cpu, the model on cuda:0" in device.evidence
    assert "register_buffer('scale'" in device.fix


def test_a_plain_tensor_that_the_step_moves_is_worth_a_remark_only():
    model = Scaled().cuda()
    model.moves = True
    finding = only(found(model, rows()), "devices")
    assert (finding.severity, finding.place) == ("info", "scale")


def test_a_result_of_cuda_that_is_thrown_away_is_found_with_its_line():
    def step(model: nn.Module, batch: Any) -> Any:
        target = torch.zeros(len(batch[0]), 1)
        target.cuda()
        return F.mse_loss(model(batch[0]), target.to(batch[0].device))

    finding = only(found(network().cuda(), rows(), step), "devices")
    assert finding.severity == "warning"
    assert finding.place.startswith("tests/doctor/test_checks_on_cuda.py:")
    assert "`target.cuda()` moves a tensor" in finding.evidence


def test_module_cuda_moves_in_place_and_tensor_cuda_returns_a_copy():
    """The row of SOURCES.md."""
    model, scale = network(), torch.ones(4)

    def step(model: nn.Module, batch: Any) -> Any:
        scale.cuda()
        return squared(model, [batch[0] * scale.to(batch[0].device), batch[1]])

    model.cuda()  # not assigned, and rightly so
    finding = only(found(model, rows(), step), "devices")
    assert "`scale.cuda()` moves a tensor" in finding.evidence
    assert finding.fix.endswith("x = scale.cuda()")


def test_memory_that_would_fill_the_device_is_found():
    kept: list[torch.Tensor] = []
    # Of the whole device: what other tests left in the cache counts as room.
    a_hundredth = torch.cuda.get_device_properties(0).total_memory // 100

    def step(model: nn.Module, batch: Any) -> Any:
        kept.append(torch.empty(a_hundredth, dtype=torch.uint8, device="cuda"))
        return squared(model, batch)

    finding = only(found(network().cuda(), rows(1600), step, steps=12), "memory_growth")
    assert finding.severity == "warning"
    assert "9 steps after the third" in finding.evidence
    assert "an epoch has 200" in finding.evidence
    kept.clear()
    assert not found(network().cuda(), rows(1600), steps=12, checks=["memory_growth"])


def test_memory_that_grows_and_does_not_fill_the_device_is_worth_a_remark_only():
    kept: list[torch.Tensor] = []

    def step(model: nn.Module, batch: Any) -> Any:
        kept.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
        return squared(model, batch)

    finding = only(found(network().cuda(), rows(), step, steps=12), "memory_growth")
    assert finding.severity == "info"
    assert "by 1.00 MiB on average" in finding.evidence
