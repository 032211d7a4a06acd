"""NaN that is made after backward, by clipping, hooks and settings; and reruns that begin with another state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite.diagnosis import NonFiniteCause
from tests.lightning_models import Regression, loader, trainer
from tests.nonfinite.observe import differences, error_at_halt, state_bits

BAD = 3


class Clips(Regression):
    """Divides the gradients by 0 at one step."""

    fused = False
    n = -1

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.n += 1
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(torch.tensor(0.0 if self.n == BAD else 1.0) / (0.0 if self.n == BAD else 1.0))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)


class Hooks(Clips):
    configure_gradient_clipping = Regression.configure_gradient_clipping

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        Clips.configure_gradient_clipping(self)


class Rate(Clips):
    configure_gradient_clipping = Regression.configure_gradient_clipping

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = float("nan") if batch_idx == BAD else 1e-2


NAMES = {
    Clips: "clipping or a hook then made the gradient of net.0.weight",
    Hooks: "clipping or a hook",
    Rate: "lr of AdamW is nan",
}


class Before(L.Callback):
    """Keeps the state from before the bad step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BAD:
            self.state = state_bits(pl_module, trainer.optimizers)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", NAMES)
def test_an_update_that_is_made_bad_after_backward_is_held_back_and_named(
    kind: Any, fused: bool, tmp_path: Path
) -> None:
    model, before = kind(), Before()
    model.fused = fused
    error = error_at_halt(model, loader(64), tmp_path, before)
    assert (error.step, error.cause) == (BAD, NonFiniteCause.UPDATE)
    assert NAMES[kind] in str(error)
    changed = differences(before.state, state_bits(model, model.trainer.optimizers))
    assert changed in ([], ["optimizer0.lr0"]), "the rate is the user's own"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", NAMES)
def test_such_an_update_can_be_skipped(kind: Any, fused: bool, tmp_path: Path) -> None:
    model = kind()
    model.fused = fused
    run = trainer(tmp_path, HaltOnNaN(max_skips=1), logger=False)
    run.fit(model, loader(64))
    assert run.global_step == 8
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


STREAM: list[float] = []


class Streams(Regression):
    """Multiplies its loss by numbers from an iterator, and from a global."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.numbers = iter([1.0] * BAD + [float("nan")] + [1.0] * 1000)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.source == "iterator":
            return loss * next(self.numbers)
        STREAM.append(1.0)
        return loss * (float("nan") if len(STREAM) == BAD + 1 else 1.0)


@pytest.mark.parametrize("source", ["iterator", "global"])
def test_a_rerun_cannot_put_everything_back_so_that_state_is_to_be_looked_at_before_the_hardware(
    source: str, tmp_path: Path
) -> None:
    STREAM.clear()
    error = error_at_halt(Streams(source), loader(64), tmp_path)
    assert error.cause == NonFiniteCause.NOT_REPRODUCIBLE
    state, _, suspects = str(error).partition("suspect kernels")
    assert "besides weights, buffers and the batch" in state
    assert "the hardware" in suspects
