"""Healthy models and evaluations that look odd: HaltOnNaN neither ends nor changes them, with and without skips."""

from __future__ import annotations

from shlex import quote
from typing import Any

import lightning as L
import pytest
import torch

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from tests.lightning_models import Regression, loader, trainer
from tests.nonfinite.healthy_models import HEALTHY, Expanded
from tests.nonfinite.observe import differences, error_at_halt, state_bits

SKIPS = pytest.mark.parametrize("max_skips", [0, 3])


def same_with_and_without(make, tmp_path, *, max_skips, **options):
    """Train with and without HaltOnNaN; everything must end in the same bits. Returns the module trained with it."""
    ends, models = [], []
    for callbacks in ([], [HaltOnNaN(max_skips=max_skips)]):
        L.seed_everything(0, verbose=False)
        model = make()
        run = trainer(tmp_path, *callbacks, logger=False, **options)
        run.fit(model, loader(64), loader(16, seed=1))
        ends.append({**state_bits(model, run.optimizers), "random": torch.get_rng_state()})
        models.append(model)
    assert differences(*ends) == []
    return models[1]


class Metrics(Regression):
    """Its metrics are NaN and Inf by design."""

    fused = False

    def validation_step(self, batch, batch_idx):
        self.log("recall_of_absent_class", torch.tensor(torch.nan))
        self.log("best_so_far", torch.tensor(torch.inf))
        if self.trainer.sanity_checking:
            self.log("val_loss", torch.tensor(torch.nan))
        return {"loss": self.loss(batch), "pearson": torch.tensor(torch.nan), "logits": torch.tensor([torch.nan, 0.0])}

    test_step = validation_step


@SKIPS
def test_metrics_that_are_not_finite_by_design_do_not_end_a_run(max_skips: int, tmp_path: Any) -> None:
    callback = HaltOnNaN(max_skips=max_skips, directory=str(tmp_path / "out"))
    run = trainer(tmp_path, callback, logger=False, num_sanity_val_steps=2, max_epochs=2)
    run.fit(Metrics(), loader(), loader())
    run.test(Metrics(), loader(), verbose=False)
    assert run.state.finished
    assert not (tmp_path / "out").exists()


@SKIPS
@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.filterwarnings("ignore:.*(lazy|Lazy|uninitialized).*")
def test_a_healthy_model_ends_in_the_same_bits(name: str, max_skips: int, tmp_path: Any) -> None:
    same_with_and_without(HEALTHY[name], tmp_path, max_skips=max_skips)


def spoiled(kind: type[L.LightningModule], bad: int = 5) -> Any:
    class Spoiled(kind):  # type: ignore[misc,valid-type]
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if batch_idx == bad else loss

    return Spoiled


@pytest.mark.parametrize("algorithm", ["value", "norm"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_skipped_under_clipping(algorithm: str, fused: bool, tmp_path: Any) -> None:
    class Fused(spoiled(Regression)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=fused)

    model = Fused()
    options = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm, "logger": False}
    run = trainer(tmp_path, HaltOnNaN(max_skips=1), **options)
    run.fit(model, loader(64))
    assert run.global_step == 8
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_buffers_of_the_bad_first_step_are_as_before_it(tmp_path: Any) -> None:
    model = spoiled(Expanded, bad=0)()
    error_at_halt(model, loader(), tmp_path)
    assert model.centre is None
    assert not hasattr(model, "count")
    assert torch.equal(model.scale, torch.ones(4))


def test_the_printed_command_can_be_pasted_into_a_shell(tmp_path: Any) -> None:
    error = error_at_halt(spoiled(Regression, 1)(), loader(), tmp_path, directory=str(tmp_path / "my run; rm"))
    assert f"memtools replay {quote(str(error.step_path))}" in str(error)
    assert "'" in quote(str(error.step_path))
