"""Explanations beyond the gallery: intended infinities, nested modules, numbers, tensors outside of buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_memtools.nonfinite.bad_step import BadStep, NonFiniteCause
from tests.nonfinite.gallery import BAD_BATCH, HEALTHY, ZERO_ROW, Small, _set, bad_data, good_data
from tests.nonfinite.given_loss import bad_line
from tests.nonfinite.observe import error_at_halt


def explained(model: L.LightningModule, batches: list[Any], root: Path) -> BadStep:
    dataset: Any = batches
    error = error_at_halt(model, dataset, root, save_last_good=False, save_step=False)
    assert error.batch_idx == BAD_BATCH
    found = error.explanation
    assert found is not None, str(error)
    return found


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("name", HEALTHY)
def test_intended_infinities_are_not_named_where_another_operation_fails(name, tmp_path):
    """The healthy models hold intended masks of -inf, infinite bounds and NaN for missing targets."""
    case = HEALTHY[name]
    base: Any = case.make

    class Fails(base):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == BAD_BATCH:
                loss = loss + torch.log(0 * self.first.weight.square().sum())  # bad
            return loss

    L.seed_everything(0, verbose=False)
    found = explained(Fails(), case.batches, tmp_path)
    assert (found.cause, found.operation, found.backward) == (NonFiniteCause.DOMAIN, "aten.log", False)
    assert (Path(found.file or ""), found.line) == (Path(__file__), bad_line(Fails))


class Scale(nn.Module):
    """To a root mean square of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x / x.square().mean(1, keepdim=True).sqrt()  # bad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = Scale(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Nested(Small):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())

    def loss(self, x):
        return super().loss(self.encoder(x))


def test_a_nested_module_and_the_inputs_are_named(tmp_path):
    found = explained(Nested(), bad_data(_set(0.0, ZERO_ROW)), tmp_path)
    assert (found.operation, found.module, found.samples) == ("aten.div", "encoder.0.norm", (3,))
    line = bad_line(Scale)
    assert (
        f"made by torch.div in encoder.0.norm (tests/nonfinite/test_explain.py:{line}), from [8, 6] float32"
        in found.what
    )
    assert "and [8, 1] float32 (1 of 8 is 0, largest magnitude" in found.what
    assert found.what.endswith("; it affects sample 3 of batch 5.")


class Running(Small):
    """Keeps a mean that is no buffer, and divides the weights of the loss by their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"mean": torch.ones(3)}

    def loss(self, x):
        with torch.no_grad():
            weights = x[:, :3].abs().sum(0)
            self.state["mean"] = 0.9 * self.state["mean"] + weights / weights.sum()
        return (self.body(x) * self.state["mean"]).square().mean()


class Replaced(Small):
    """The same with a parameter, which the step replaces: the optimizer knows the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.ones(3))

    def loss(self, x):
        weights = x[:, :3].abs().sum(0)
        self.mean = nn.Parameter(0.9 * self.mean.detach() + weights / weights.sum())
        return (self.body(x) * self.mean).square().mean()


@pytest.mark.parametrize(
    ("make", "kind", "name"), [(Running, "attribute", 'state["mean"]'), (Replaced, "parameter", "mean")]
)
def test_a_tensor_that_the_step_writes_and_that_is_no_buffer_is_named_as_such(make, kind, name, tmp_path):
    """It is not restored, so that it is NaN when the step begins again."""
    found = explained(make(), bad_data(_set(0.0, slice(None))), tmp_path)
    assert found.cause == NonFiniteCause.BAD_PARAMETER
    assert f"{kind} {name} is no buffer, and the step writes it" in found.because
    assert "register_buffer" in found.advice
    assert name in found.unrestored


class Codebook(Small):
    """A VQ-VAE's codes: a parameter that the step writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(3), requires_grad=False)

    def loss(self, x):
        self.codes.mul_(0.9).add_(0.1 * x[:, :3].mean(0))
        return (self.body(x) - self.codes).square().mean() + (x / x.abs().sum(1, keepdim=True)).mean()


def test_a_parameter_that_the_step_writes_is_named_as_not_restored(tmp_path):
    found = explained(Codebook(), bad_data(_set(0.0, ZERO_ROW)), tmp_path)
    assert (found.cause, found.operation, found.unrestored) == (NonFiniteCause.DOMAIN, "aten.div", ("codes",))


def test_a_tensor_that_is_no_buffer_and_was_bad_before_is_named(tmp_path):
    class Breaks(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == BAD_BATCH:
                pl_module.state["mean"][1] = torch.nan

    dataset: Any = good_data()
    model = Running()
    error = error_at_halt(model, dataset, tmp_path, Breaks(), directory=str(tmp_path))
    found = error.explanation
    assert found.cause == NonFiniteCause.BAD_PARAMETER
    assert 'state["mean"], first used by torch.mul in Running.loss (' in found.what
    assert "register_buffer" in found.advice
    assert model.state["mean"].isnan().tolist() == [False, True, False], "it is as it was"
