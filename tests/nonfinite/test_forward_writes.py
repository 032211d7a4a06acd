"""State that a forward pass writes and that is no buffer: it is restored, or the report says that it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from tests.lightning_models import Regression, loader, trainer
from tests.nonfinite.observe import differences, error_at_halt


class Writes(Regression):
    """A model with a second encoder, a codebook and a centre, which its forward pass writes before a bad loss."""

    def __init__(self, write: Callable[[Any], None], bad: int) -> None:
        super().__init__()
        self.write, self.bad, self.fused = write, bad, False
        self.encoder = copy.deepcopy(self.net).requires_grad_(requires_grad=False)
        self.codebook = nn.Parameter(torch.ones(4))  # never gets a gradient
        self.centre = torch.zeros(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = {name: value.clone() for name, value in self.everything().items()}
        with torch.no_grad():
            self.write(self)
        if batch_idx == self.bad:
            self.before = before
        loss: Tensor = self.loss(batch)
        return loss * torch.nan if batch_idx == self.bad else loss

    def everything(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), "centre": self.centre}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)


def momentum(model: Any) -> None:
    for slow, fast in zip(model.encoder.parameters(), model.net.parameters(), strict=True):
        slow.mul_(0.9).add_(fast, alpha=0.1)


def momentum_as_data(model: Any) -> None:
    for slow, fast in zip(model.encoder.parameters(), model.net.parameters(), strict=True):
        slow.data = slow.data * 0.9 + fast.data * 0.1


def replaced_centre(model: Any) -> None:
    model.centre = model.centre * 0.9 + 0.1


def written_centre(model: Any) -> None:
    model.centre.mul_(0.9).add_(0.1)


def codebook(model: Any) -> None:
    model.codebook.mul_(0.9)


def replaced_codebook(model: Any) -> None:
    model.codebook = nn.Parameter(model.codebook * 0.9)


WRITES = [momentum, momentum_as_data, replaced_centre, written_centre, codebook, replaced_codebook]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_what_earlier_steps_wrote_is_as_before_the_step(write: Any, fused: bool, tmp_path: Any) -> None:
    model = Writes(write, bad=4)
    model.fused = fused
    error = error_at_halt(model, loader(64), tmp_path)
    assert error.step == 4
    left = differences(model.before, model.everything())
    if fused and write is replaced_centre:
        assert set(left) <= {"centre"}
    else:
        assert left == []
    assert ", except" not in str(error)


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_for_the_first_time_is_named(write: Any, tmp_path: Any) -> None:
    model = Writes(write, bad=0)
    error = error_at_halt(model, loader(64), tmp_path)
    left = differences(model.before, model.everything())
    for name in left:
        assert name in str(error).partition(", except ")[2]
    assert left == [] if write in {replaced_centre, replaced_codebook} else left
    assert ("(but for" in str(error)) == bool(left)


def test_weights_that_the_forward_pass_writes_itself_are_named(tmp_path: Any) -> None:
    model = Writes(lambda model: model.net[0].weight.clamp_(-0.01, 0.01), bad=4)
    error = error_at_halt(model, loader(64), tmp_path)
    assert differences(model.before, model.everything()) == ["net.0.weight"]
    assert ", except net.0.weight" in str(error)


def test_a_write_that_leaves_no_trace_is_found_when_the_step_runs_again(tmp_path: Any) -> None:
    model = Writes(lambda model: model.codebook.data.mul_(0.9), bad=4)
    error = error_at_halt(model, loader(64), tmp_path)
    assert differences(model.before, model.everything()) == ["codebook"]
    assert "except codebook" in str(error)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("write", [momentum, replaced_codebook])
def test_what_forward_writes_is_as_before_a_skipped_step(write: Any, fused: bool, tmp_path: Any) -> None:
    model = Writes(write, bad=4)
    model.fused = fused
    trainer(tmp_path, HaltOnNaN(max_skips=1), logger=False, limit_train_batches=5).fit(model, loader(64))
    assert differences(model.before, model.everything()) == []


def test_updates_of_several_optimizers_are_no_writes_of_a_forward_pass(tmp_path: Any) -> None:
    class Two(Writes):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__(momentum, bad=4)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(part.parameters(), lr=1e-2) for part in (list(self.net.children())[i] for i in (0, 4))
            ]

    model = Two()
    error = error_at_halt(model, loader(64), tmp_path)
    assert ", except" not in str(error)
    assert differences(model.before, model.everything()) == []
