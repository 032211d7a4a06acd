"""Healthy models and evaluations that look odd: HaltOnNaN neither ends nor changes them."""

from __future__ import annotations

from shlex import quote
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from tests.lightning_models import Regression, loader, trainer
from tests.nonfinite.observe import differences, error_at_halt, state_bits


class Expanded(Regression):
    """Buffers that are expanded, None at first, and registered in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(4))
        self.register_buffer("centre", None)

    def loss(self, batch):
        x, y = batch
        mean = x.detach().mean(0)
        self.centre = mean if self.centre is None else 0.9 * self.centre + 0.1 * mean
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(()))
        self.count += 1
        return nn.functional.mse_loss(self.net(x * self.scale - self.centre), y)


class OneGraph(Regression):
    """A GAN that sends one graph backward for two updates, through normalisation in evaluation mode."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        normalized = nn.utils.spectral_norm(nn.Linear(1, 4))
        self.other = nn.Sequential(normalized, nn.BatchNorm1d(4), nn.Linear(4, 1))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.net, self.other)]

    def training_step(self, batch, batch_idx):
        x, _ = batch
        self.other[1].eval()
        made = self.net(x)
        judged = self.other(made)
        first, second = self.optimizers()
        gradients = torch.autograd.grad(judged.square().mean(), list(self.other.parameters()), retain_graph=True)
        for parameter, gradient in zip(self.other.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.other[1].momentum = 0.1
        second.step()
        first.zero_grad()
        self.manual_backward(made.square().mean())
        first.step()


class Metrics(Regression):
    """Its metrics are NaN and Inf by design."""

    def validation_step(self, batch, batch_idx):
        self.log("recall_of_absent_class", torch.tensor(torch.nan))
        self.log("best_so_far", torch.tensor(torch.inf))
        if self.trainer.sanity_checking:
            self.log("val_loss", torch.tensor(torch.nan))
        return {"loss": self.loss(batch), "pearson": torch.tensor(torch.nan), "logits": torch.tensor([torch.nan, 0.0])}

    test_step = validation_step


def test_metrics_that_are_not_finite_by_design_do_not_end_a_run(tmp_path: Any) -> None:
    callback = HaltOnNaN(directory=str(tmp_path / "out"))
    run = trainer(tmp_path, callback, logger=False, num_sanity_val_steps=2, max_epochs=2)
    run.fit(Metrics(), loader(), loader())
    run.test(Metrics(), loader(), verbose=False)
    assert run.state.finished
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [Expanded, OneGraph])
def test_a_healthy_model_ends_in_the_same_bits(make: Any, tmp_path: Any) -> None:
    ends = []
    for callbacks in ([], [HaltOnNaN()]):
        L.seed_everything(0, verbose=False)
        model = make()
        run = trainer(tmp_path, *callbacks, logger=False)
        run.fit(model, loader(64), loader(16, seed=1))
        ends.append({**state_bits(model, run.optimizers), "random": torch.get_rng_state()})
    assert differences(*ends) == []


def spoiled(kind: type[L.LightningModule], bad: int = 5) -> Any:
    class Spoiled(kind):  # type: ignore[misc,valid-type]
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if batch_idx == bad else loss

    return Spoiled


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
