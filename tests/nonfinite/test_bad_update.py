"""Updates that clipping, hooks and settings make bad; and reruns that begin with another state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memtools.nonfinite.bad_step import suspects_of_update
from lightning_memtools.nonfinite.causes import NonFiniteCause
from lightning_memtools.nonfinite.finite_checks import BadTensor
from tests.lightning_models import Regression, loader
from tests.nonfinite.observe import error_at_halt

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


class Rate(Clips):
    configure_gradient_clipping = Regression.configure_gradient_clipping

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = float("nan") if batch_idx >= BAD else 1e-2


SUSPECTS = {
    Clips: "the last update was that of AdamW at a learning rate of 0.01",
    Rate: "lr is nan",
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", SUSPECTS)
def test_an_update_that_is_made_bad_after_backward_is_named_at_the_next_step(
    kind: Any, fused: bool, tmp_path: Path
) -> None:
    model = kind()
    model.fused = fused
    saver = ModelCheckpoint(tmp_path / "every", every_n_epochs=1, save_on_exception=True)
    error = error_at_halt(model, loader(64), tmp_path, saver, options={"enable_checkpointing": True})
    assert (error.step, error.cause) == (BAD + 1, NonFiniteCause.BAD_PARAMETER)
    assert "was already NaN or Inf before this step" in str(error)
    assert SUSPECTS[kind] in str(error)
    assert error.checkpoint_path is None
    assert not list(tmp_path.rglob("*.ckpt")), "no checkpoint holds NaN"


def test_an_eps_that_is_0_in_the_weights_type_is_suspected() -> None:
    layer = torch.nn.Linear(2, 2, dtype=torch.float16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
    bad = [BadTensor("weight", 1, 0, 4)]
    assert "eps=1e-08 is 0 in float16" in suspects_of_update(layer, [optimizer], bad)[0]
    assert "eps" not in suspects_of_update(layer.float(), [optimizer], bad)[0]
    assert suspects_of_update(layer, [], bad) == ("", "")


class Streams(Regression):
    """Multiplies its loss by numbers from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter([1.0] * BAD + [float("nan")] + [1.0] * 1000)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * next(self.numbers)


def test_a_rerun_cannot_put_everything_back_so_that_state_is_suspected_before_the_hardware(
    tmp_path: Path,
) -> None:
    error = error_at_halt(Streams(), loader(64), tmp_path)
    assert error.cause == NonFiniteCause.NOT_REPRODUCIBLE
    state, _, suspects = str(error).partition("it may be kernels")
    assert "besides weights, buffers and the batch" in state
    assert "the hardware" in suspects
