"""How diagnose deals with steps that fail, names that do not exist, and what it leaves behind; and the report."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memtools import TrainingDoctor, diagnose
from lightning_memtools.doctor import step_trial
from lightning_memtools.doctor.examination import CHECKS, selected_checks
from lightning_memtools.doctor.findings import DoctorReport, Finding
from lightning_memtools.state.random_state import RandomState
from tests.doctor.specimens import found, network, rows, serious, squared
from tests.lightning_models import Adversaries, Regression, loader
from tests.tuner_runs import Small, fit


def test_an_unknown_check_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'loss_brodcast'.* 'loss_broadcast'\? .*shared_memory"):
        selected_checks("loss_brodcast", ())
    with pytest.raises(ValueError, match="no check 'nothing'"):
        diagnose(network(), rows(), step=squared, ignore=["nothing"])
    assert selected_checks("all", ["devices"]) == tuple(name for name in CHECKS if name != "devices")


def test_steps_and_a_plain_module_without_a_step_are_refused():
    with pytest.raises(ValueError, match="steps=0 watches nothing"):
        diagnose(network(), rows(), step=squared, steps=0)
    with pytest.raises(ValueError, match="Sequential is no LightningModule"):
        diagnose(network(), rows())


@pytest.mark.parametrize("batch", [torch.ones(8, 4), (torch.ones(8, 4), torch.ones(8)), {"rows": torch.ones(8, 4)}])
def test_a_batch_in_the_place_of_a_loader_is_refused(batch):
    with pytest.raises(TypeError, match=rf"one batch, a {type(batch).__name__}.* \[batch\]"):
        diagnose(network(), batch, step=squared)


def test_a_step_that_fails_for_the_users_reason_is_reported_as_that_and_the_other_checks_run():
    def step(model: nn.Module, batch: Any) -> Any:
        raise KeyError("the user's own mistake")

    model = network()
    model[0].register_buffer("scale", torch.ones(3, device="meta"))
    findings = found(model, rows(), step)
    assert [(one.check, one.severity) for one in findings if one.check != "reproducibility"] == [
        ("step", "error"),
        ("devices", "warning"),
        ("trial", "info"),
    ]
    assert 'KeyError: "the user\'s own mistake"' in findings[0].evidence
    assert 'mistake". Training ends there' in str(findings[0])
    assert findings[0].place.startswith("tests/doctor/test_trials_and_report.py:")


class Holds(nn.Module):
    """A network that adds rows of a tensor of a kind that fake tensors do not have."""

    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self.net, self.held = network(), tensor

    def forward(self, x: Any) -> Any:
        dense = self.held.dequantize() if self.held.is_quantized else self.held.to_dense()
        return self.net(x + dense)


WITHOUT_FAKES: dict[str, Any] = {
    "sparse_csr": lambda: torch.ones(8, 4).to_sparse_csr(),
    "sparse_coo": lambda: torch.ones(8, 4).to_sparse(),
    "mkldnn": lambda: torch.ones(8, 4).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(8, 4), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|quantize_per_tensor|TypedStorage).*")
@pytest.mark.parametrize("kind", WITHOUT_FAKES)
def test_a_model_with_tensors_that_have_no_fakes_is_tried_with_values(kind, monkeypatch):
    def step(model: nn.Module, batch: Any) -> Any:
        return ((model(batch[0]) - batch[1].squeeze()) ** 2).mean()

    tensor = WITHOUT_FAKES[kind]()
    findings = found(Holds(tensor), rows(), step, steps=2)
    assert [one.check for one in findings if one.check in {"trial", "loss_broadcast"}] == ["loss_broadcast"]

    monkeypatch.setattr(step_trial, "_MAX_COPIED_BYTES", 0)  # as a large model
    (trial,) = [one for one in found(Holds(tensor), rows(), step, steps=2) if one.check == "trial"]
    assert trial.fix.startswith(f"Nothing: there are no fake tensors of held's kind ({kind})")


def test_a_batch_of_nested_tensors_is_tried_with_values():
    texts = [torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged) for _ in range(4)]

    def step(model: nn.Module, batch: Any) -> Any:
        return ((model(batch[0]).values() - batch[1].squeeze()) ** 2).mean()

    findings = found(nn.Linear(4, 1), [(text, torch.ones(8, 1)) for text in texts], step, steps=2)
    assert [one.check for one in findings if one.check in {"trial", "loss_broadcast"}] == ["loss_broadcast"]


def test_a_step_that_reads_values_is_tried_with_values():
    def step(model: nn.Module, batch: Any) -> Any:
        loss = squared(model, batch)
        return loss * 2 if loss.item() > 1 else torch.nn.functional.mse_loss(model(batch[0])[:, 0], batch[1])

    with pytest.warns(UserWarning, match="target size"):
        step(network(), [torch.zeros(8, 4), torch.zeros(8, 1)])
    findings = found(network(), rows(), step, checks=["loss_broadcast"])
    assert not [one for one in findings if one.check == "trial"]


def test_a_check_that_fails_itself_is_left_out_and_said(monkeypatch):
    class Fails:
        def __init__(self, case: Any) -> None:
            pass

        def before_training(self) -> Any:
            raise RuntimeError("of the check")

    monkeypatch.setattr("lightning_memtools.doctor.examination.CHECKS", {**CHECKS, "devices": Fails})
    (finding,) = [one for one in found(network(), rows()) if one.check == "devices"]
    assert finding.severity == "info"
    assert "It raised RuntimeError: of the check" in finding.evidence


@pytest.mark.parametrize("kind", [Regression, Adversaries])
def test_diagnose_leaves_everything_as_it_was(kind):
    torch.manual_seed(0)
    model = kind()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes, random = set(vars(model)), RandomState.now()
    report = diagnose(model, loader(), val_dataloader=loader(16))
    assert (report.serious, report.steps) == ((), 20)
    assert {name: torch.equal(value, before[name]) for name, value in model.state_dict().items()} == dict.fromkeys(
        before, True
    )
    assert set(vars(model)) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert RandomState.now() == random
    assert not getattr(model, "train_losses", [])
    assert model.training


def test_the_users_optimizer_is_as_before():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    assert not serious(found(model, rows(), optimizer=optimizer))
    assert not optimizer.state_dict()["state"]


def finding(severity: Any, check: str = "devices") -> Finding:
    return Finding(check, severity, "here", "A | was 3.", "It fails.", "Mend it.")


def test_the_report_puts_what_is_serious_first_and_says_it_once():
    report = DoctorReport.of(
        [finding("info"), finding("warning"), finding("error"), finding("warning")], ["devices", "loss_sum"], 7
    )
    assert [one.severity for one in report.findings] == ["error", "warning", "info"]
    assert len(report.serious) == 2
    content = json.loads(report.as_json())
    assert content["serious"] == 2
    assert content["steps"] == 7
    assert content["checks"] == ["devices", "loss_sum"]
    assert content["findings"][0] == {
        "check": "devices",
        "severity": "error",
        "place": "here",
        "evidence": "A | was 3.",
        "effect": "It fails.",
        "fix": "Mend it.",
    }
    assert "| error | devices, here: A \\| was 3. It fails. | Mend it. |" in report.markdown()
    assert "Nothing was found." in DoctorReport().markdown()


def test_a_trial_keeps_no_batch_alive(tmp_path):
    """Moving a tensor in a step, as `self.log` does, once made a cycle of frames that held the first batch."""
    alive: list[int] = []

    class Watches(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            alive.append(sum(one() is not None for one in seen))
            seen.append(weakref.ref(batch))

    seen: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        fit(tmp_path, None, Small(), TrainingDoctor(), Watches(), limit_val_batches=0, limit_train_batches=3)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]
