"""The gallery: each failing model halts at its first bad step with the right cause; the healthy ones are left alone."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from tests.lightning_models import trainer
from tests.nonfinite import gallery
from tests.nonfinite.gallery import BODY_IS_MASKED, FAILING, HEALTHY, Case
from tests.nonfinite.observe import Observer, differences, error_at_halt, state_bits


def observed(case: Case, root: Path) -> Observer:
    L.seed_everything(0, verbose=False)
    observer = Observer()
    trainer(root, observer, logger=False).fit(case.make(), case.loader())
    return observer


VARIANTS = [*((name, False) for name in FAILING), *((name, True) for name in BODY_IS_MASKED)]


@pytest.mark.parametrize(("name", "masked"), VARIANTS)
def test_a_failing_model_halts_at_its_first_bad_step_with_the_right_cause(name, masked, tmp_path, monkeypatch):
    case = FAILING[name]
    if masked:
        monkeypatch.setattr(case.make, "masked", True)
    observer = observed(case, tmp_path)
    assert observer.first_bad is not None, "the gallery's model must fail"
    if case.bad_batch is not None:
        assert observer.batch_idx == case.bad_batch

    L.seed_everything(0, verbose=False)
    model = case.make()
    error = error_at_halt(model, case.loader(), tmp_path)
    assert error.step == observer.first_bad
    assert error.batch_idx == observer.batch_idx
    assert error.cause == case.cause
    assert (error.rank, error.stage) == (0, "train")
    found = error.explanation
    assert (found.operation, found.module, found.backward) == (case.operation, case.module, case.backward)
    assert (Path(found.file or ""), found.line) == (Path(gallery.__file__), case.line)
    assert case.tried in found.confirmed
    assert "the step is bad" not in found.confirmed.rpartition("; ")[2], "what was tried last is what confirms it"
    assert differences(observer.before, state_bits(model, model.trainer.optimizers)) == []
    assert model.trainer.global_step == observer.first_bad * len(model.trainer.optimizers) + (name == "manual")
    assert all(each.requires_grad for each in model.parameters()), "not as a toggled optimizer left them"
    if case.cause is not None and name != "bad_parameter":
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_runs_two_hundred_steps(name, tmp_path, recwarn):
    case = HEALTHY[name]
    L.seed_everything(0, verbose=False)
    run = trainer(tmp_path, HaltOnNaN(), logger=False, max_epochs=None, max_steps=200)
    run.fit(case.make(), case.loader())
    assert run.global_step == 200
    assert not [warning for warning in recwarn if "HaltOnNaN" in str(warning.message)]
