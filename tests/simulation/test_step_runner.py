"""Steps run in Lightning's own loops, with a Trainer that is not the user's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_memtools.estimate import estimate_memory
from tests.estimate.networks import Classifier, Gan

BATCH = (torch.zeros(16, 32), torch.zeros(16, dtype=torch.long))


class Asks(Classifier):
    """Notes what it is told."""

    def __init__(self, told):
        super().__init__()
        self.__dict__["told"] = told.append  # not looked into, so not put back

    def training_step(self, batch, batch_idx):
        rows, classes = batch
        scores = self.network(rows)
        self.print("a line")
        gathered = self.all_gather({"scores": scores, "n": 3}, sync_grads=True)
        self.told((tuple(gathered["scores"].shape), isinstance(gathered["n"], torch.Tensor)))
        self.told(self.lr_schedulers())
        self.told((self.trainer.world_size, self.global_rank, self.current_epoch, self.trainer.is_last_batch))
        return F.cross_entropy(scores, classes)


def test_gathering_from_all_ranks_gives_what_one_rank_has(capsys):
    told = []
    made = estimate_memory(Asks(told), BATCH, steps=1)
    shape, scheduler, place = told
    # As Lightning's all_gather in one process: the tensor as it is, numbers as tensors.
    assert shape == ((16, 4), True)
    assert isinstance(scheduler, torch.optim.lr_scheduler.ConstantLR)
    assert place == (1, 0, 0, False)
    assert capsys.readouterr().out == ""
    assert made.gradient_count == made.parameter_count


@pytest.mark.parametrize(("stage", "name"), [("val", "validation"), ("test", "test"), ("predict", "predict")])
def test_every_stage_runs_its_own_step(stage, name):
    seen = []

    def step(module, batch, batch_idx):
        trainer = module.trainer
        seen.append((module.training, torch.is_grad_enabled(), batch_idx))
        assert (trainer.validating, trainer.testing, trainer.predicting) == tuple(
            stage == one for one in ("val", "test", "predict")
        )
        return module.network(batch[0])

    module = type("Evaluates", (Classifier,), {f"{name}_step": step})()
    made = estimate_memory(module, BATCH, stage=stage)
    assert seen == [(False, False, 0), (False, False, 1)]
    assert made.gradient_count == 0


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_tensors_that_a_step_makes_are_of_the_precision_too(precision, dtype):
    # Lightning's plugin sets the default dtype around the step, and not around configure_optimizers.
    seen = []

    class Makes(Gan):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            seen.append(torch.zeros(1).dtype)

        def configure_optimizers(self):
            seen.append(torch.zeros(1).dtype)
            return super().configure_optimizers()

    estimate_memory(Makes(), torch.zeros(64, 64), precision=precision)
    assert seen == [torch.float32, dtype, dtype]
    assert torch.get_default_dtype() is torch.float32
