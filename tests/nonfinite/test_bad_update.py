"""Updates that clipping and settings make bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memtools.nonfinite.causes import NonFiniteCause
from tests.lightning_models import Regression, loader
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


class Rate(Clips):
    configure_gradient_clipping = Regression.configure_gradient_clipping

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = float("nan") if batch_idx >= BAD else 1e-2


SUSPECTS = {
    Clips: "the last update was that of AdamW at a learning rate of 0.01",
    Rate: "the last update was that of AdamW at a learning rate of nan",
}


@pytest.mark.parametrize("kind", SUSPECTS)
def test_an_update_that_is_made_bad_after_backward_is_named_at_the_next_step(kind: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "every", every_n_epochs=1, save_on_exception=True)
    error = error_at_halt(kind(), loader(64), tmp_path, saver, options={"enable_checkpointing": True})
    assert (error.step, error.cause) == (BAD + 1, NonFiniteCause.BAD_PARAMETER)
    assert "was already NaN or Inf before this step" in str(error)
    assert SUSPECTS[kind] in str(error)
    assert error.checkpoint_path is None
    assert not list(tmp_path.rglob("*.ckpt")), "no checkpoint holds NaN"
