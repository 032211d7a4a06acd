"""How diagnose deals with its arguments and with steps that fail, what it leaves behind, and the report."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memtools import diagnose
from lightning_memtools.doctor import examination
from lightning_memtools.doctor.examination import NAMES, selected_checks
from lightning_memtools.doctor.findings import DoctorReport, Finding
from lightning_memtools.state.random_state import RandomState
from tests.doctor.specimens import Logs, found, network, rows, serious, squared
from tests.lightning_models import Adversaries, Regression, loader


def test_an_unknown_check_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"no check 'loss_brodcast'.* loss_broadcast"):
        diagnose(network(), rows(), step=squared, ignore=["loss_brodcast"])
    assert selected_checks("all", ["devices"]) == tuple(name for name in NAMES if name != "devices")


def test_steps_and_a_plain_module_without_a_step_are_refused():
    with pytest.raises(ValueError, match="steps=0 watches nothing"):
        diagnose(network(), rows(), step=squared, steps=0)
    with pytest.raises(ValueError, match="Sequential is no LightningModule"):
        diagnose(network(), rows())


@pytest.mark.parametrize("kind", [tuple, list, lambda pair: {0: pair[0], 1: pair[1]}], ids=["tuple", "list", "dict"])
def test_one_batch_in_the_place_of_a_loader_is_that_batch(kind):
    batch = kind(next(iter(rows())))
    report = diagnose(network(), batch, step=squared, steps=3)
    assert (report.serious, report.steps) == ((), 3)


def test_a_step_that_logs_and_reads_values_brings_no_remark():
    assert not diagnose(Logs(), loader(), steps=3, ignore=["reproducibility"]).findings


def test_a_step_that_fails_for_the_users_reason_is_reported_as_that_and_the_other_checks_run():
    def step(model: nn.Module, batch: Any) -> Any:
        raise KeyError("the user's own mistake")

    model = network()
    model[0].register_buffer("scale", torch.ones(3, device="meta"))
    findings = [one for one in found(model, rows(), step) if one.check != "reproducibility"]
    assert [(one.check, one.severity) for one in findings] == [("step", "error"), ("devices", "warning")]
    assert 'KeyError: "the user\'s own mistake"' in findings[0].evidence
    assert findings[1].place == "0.scale"
    assert "0.scale is on meta" in findings[1].evidence
    assert findings[0].place.startswith("tests/doctor/test_diagnose.py:")


def test_a_check_that_fails_itself_is_left_out_and_said(monkeypatch):
    broken = [(name, event, (lambda *_: 1 / 0) if name == "devices" else do) for name, event, do in examination.CHECKS]
    monkeypatch.setattr(examination, "CHECKS", tuple(broken))
    with pytest.warns(UserWarning, match=r"devices \(ZeroDivisionError"):
        assert not serious(found(network(), rows()))


@pytest.mark.parametrize("kind", [Regression, Adversaries])
def test_diagnose_leaves_everything_as_it_was(kind):
    torch.manual_seed(0)
    model = kind()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes, random = set(vars(model)), RandomState.now()
    report = diagnose(model, loader(), val_dataloader=loader(16))
    assert (report.serious, report.steps) == ((), 20)
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []
    assert set(vars(model)) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert RandomState.now() == random
    assert not getattr(model, "train_losses", [])
    assert model.training
    assert not torch.is_anomaly_enabled()


def test_the_users_optimizer_is_as_before():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    assert not serious(found(model, rows(), optimizer=optimizer))
    assert not optimizer.state_dict()["state"]


def finding(severity: Any) -> Finding:
    return Finding("devices", severity, "here", "A | was 3.", "It fails.", "Mend it.")


def test_the_report_puts_what_is_serious_first_and_says_it_once():
    report = DoctorReport.of([finding("info"), *[finding("warning"), finding("error")] * 2], ["devices", "loss_sum"], 7)
    assert [one.severity for one in report.findings] == ["error", "warning", "info"]
    assert len(report.serious) == 2
    content = json.loads(report.as_json())
    assert (content["serious"], content["steps"], content["checks"]) == (2, 7, ["devices", "loss_sum"])
    assert content["findings"][0] == {
        "check": "devices", "severity": "error", "place": "here",
        "evidence": "A | was 3.", "effect": "It fails.", "fix": "Mend it.",
    }  # fmt: skip
    assert "| error | devices, here: A \\| was 3. It fails. | Mend it. |" in report.markdown()
    assert "Nothing was found." in DoctorReport().markdown()
