"""What a LightningModule's step may ask of its Trainer."""

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
    assert place == (1, 0, 0, True)
    assert capsys.readouterr().out == ""
    assert made.gradient_count == made.parameter_count


def test_schedulers_of_manual_optimization_can_be_stepped():
    rates = []

    class Schedules(Gan):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            first, second = self.lr_schedulers()
            first.step()
            second.step()
            rates.append((first.get_last_lr(), second.get_last_lr()))

        def configure_optimizers(self):
            optimizers = super().configure_optimizers()
            return optimizers, [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in optimizers]

    plain = estimate_memory(Gan(), torch.zeros(64, 64))
    made = estimate_memory(Schedules(), torch.zeros(64, 64))
    assert rates == [([0.0005], [0.0005]), ([0.00025], [0.00025])]
    assert made.peak_allocated == plain.peak_allocated


def test_what_it_does_not_have_is_named_with_a_way_around():
    class Wants(Classifier):
        def training_step(self, batch, batch_idx):
            return self.trainer.fit_loop.restarting

    with pytest.raises(AttributeError, match=r"asked its Trainer for 'fit_loop'.*Pass step=lambda"):
        estimate_memory(Wants(), BATCH)
