"""Models in users' style: right step, state, checkpoint and cause where one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memtools import replay
from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite.bad_step import NonFiniteError
from lightning_memtools.nonfinite.causes import NonFiniteCause
from tests.lightning_models import trainer
from tests.nonfinite import user_models
from tests.nonfinite.given_loss import BAD, bad_line, batches
from tests.nonfinite.observe import Observer, differences, state_bits
from tests.nonfinite.user_models import CASES, UserModel

pytestmark = pytest.mark.filterwarnings("ignore:.*(lazy|Lazy|uninitialized|stream does not match|degrees of freedom).*")


def trained(name: str, root: Path, *callbacks: L.Callback) -> tuple[Any, L.Trainer]:
    L.seed_everything(0, verbose=False)
    model = UserModel(CASES[name])
    data = [batch["x"] for batch in batches()]
    data[BAD].zero_()
    run = trainer(root, *callbacks, logger=False)
    run.fit(model, DataLoader([CASES[name].pack(x) for x in data], batch_size=None))  # type: ignore[arg-type]
    return model, run


class StepStart(Observer):
    """Keeps the state that the first bad step began with: that of its first batch, or after the update before it."""

    def on_train_start(self, trainer, pl_module):
        self.began = {}
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(lambda *_: self.keep(trainer, pl_module))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.keep(trainer, pl_module)

    def keep(self, trainer, pl_module):
        if self.first_bad is None:
            self.began = state_bits(pl_module, trainer.optimizers)


@pytest.mark.parametrize("name", CASES)
def test_a_failing_model_of_a_user(name, tmp_path):
    case, observer = CASES[name], StepStart()
    trained(name, tmp_path, observer)
    model = run = None

    class Watch(L.Callback):
        def setup(self, trainer, pl_module, stage):
            nonlocal model, run
            model, run = pl_module, trainer

    halt = HaltOnNaN(directory=str(tmp_path / "out"))
    with pytest.raises(NonFiniteError) as caught:
        trained(name, tmp_path, Watch(), halt)
    error = caught.value
    assert (error.step, error.batch_idx) == (observer.first_bad, BAD)
    assert all(each.requires_grad for each in model.net.parameters()), "not as a toggled optimizer left them"
    changed = differences(observer.began, state_bits(model, run.optimizers))
    # What a forward pass writes beside buffers is not restored, but named.
    assert {each.removeprefix("model.") for each in changed} <= set(error.explanation.unrestored)
    if not case.restored:
        assert (error.cause, error.checkpoint_path) == (NonFiniteCause.BAD_PARAMETER, None)
        assert "register_buffer" in str(error)
        return
    saved = torch.load(error.checkpoint_path, weights_only=True)
    assert differences(saved["state_dict"], dict(model.state_dict())) == []
    assert all(torch.isfinite(value).all() for value in saved["state_dict"].values())
    found = error.explanation
    named = (error.cause, found.operation, found.module, found.backward)
    assert named == (NonFiniteCause.DOMAIN, case.operation, "", False)
    assert (found.file, found.line) == (user_models.__file__, bad_line(case.loss))
    if case.n_optimizers > 1:
        again = replay(error.step_path, model=lambda: UserModel(case))
        assert again.exact, again.mismatches
        assert again.explanation.operation == case.operation
