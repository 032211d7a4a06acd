"""Updates that are bad, or partly made, though the gradients before them were finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memtools.nonfinite.bad_step import NonFiniteCause
from tests.lightning_models import Regression, loader
from tests.nonfinite import given_loss
from tests.nonfinite.observe import error_at_halt

BAD = 3


class Clips(Regression):
    """Divides the gradients by 0 at one step."""

    n = -1

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.n += 1
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(torch.tensor(0.0 if self.n == BAD else 1.0) / (0.0 if self.n == BAD else 1.0))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_an_update_that_is_made_bad_after_backward_is_named_at_the_next_step(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "every", every_n_epochs=1, save_on_exception=True)
    error = error_at_halt(Clips(), loader(64), tmp_path, saver, options={"enable_checkpointing": True})
    assert (error.step, error.cause) == (BAD + 1, NonFiniteCause.BAD_PARAMETER)
    assert "was already NaN or Inf before this step" in str(error)
    assert "the last update was that of AdamW at a learning rate of 0.01" in str(error)
    assert error.checkpoint_path is None
    assert not list(tmp_path.rglob("*.ckpt")), "no checkpoint holds NaN"


def second_is_nan(m: Any, batch: Any) -> Any:
    """The optimizer evaluates the loss several times in a step; in one step, the second evaluation is NaN."""
    m.n_evaluations = m.n_evaluations + 1 if batch["is_bad"] else 0
    return m.net(batch["x"]).square().mean() * (torch.nan if m.n_evaluations == 2 else 1.0)


def test_the_weights_that_an_optimizer_has_moved_within_its_step_are_not_claimed(tmp_path):
    model = given_loss.Net(second_is_nan, lambda parameters: torch.optim.LBFGS(parameters, max_iter=3), n_evaluations=0)
    error = error_at_halt(model, given_loss.batches(is_bad=lambda index: index == BAD), tmp_path)
    assert error.step == BAD
    assert "that evaluations of the loss in this step have moved" in str(error)
