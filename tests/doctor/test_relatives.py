"""Relatives of the mistakes that users report, and healthy runs that look like them."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR

from tests.doctor.specimens import Paced, doctored, found, network, only, rows, serious, squared
from tests.lightning_models import loader


def frozen(part: nn.Module) -> nn.Module:
    return part.requires_grad_(requires_grad=False)


# --- BatchNorm of a part that is frozen


class Tuned(L.LightningModule):
    """A frozen backbone and a head; the loop calls train() at the start of each epoch."""

    def __init__(self, *, mended: bool = False) -> None:
        super().__init__()
        self.backbone, self.head, self.mended = frozen(network(norm=True).eval()), nn.Linear(1, 1), mended

    def on_train_epoch_start(self) -> None:
        self.train()
        if self.mended:
            self.backbone.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)  # of the frozen part too


@pytest.mark.parametrize("mended", [False, True])
def test_a_loop_that_calls_train_on_a_frozen_backbone(mended, tmp_path):
    findings = doctored(tmp_path, Tuned(mended=mended), rows())
    assert [(one.check, one.place) for one in findings] == [("frozen_batch_norm", "backbone.1")] * (not mended)


def follows(both: Any, batch: Any, *, by_assignment: bool = False) -> Any:
    """As a momentum encoder: it runs in train mode, and its weights follow those that are trained."""
    with torch.no_grad():
        for own, other in zip(both["follower"].parameters(), both["net"].parameters(), strict=True):
            if by_assignment:
                own.data = own.data * 0.9 + other.data * 0.1
            else:
                own.lerp_(other, 0.1)
        target = both["follower"](batch[0])
    return F.mse_loss(both["net"](batch[0]), target + batch[1])


def adversarial(both: Any, batch: Any) -> Any:
    """As toggle_optimizer does: the critic is frozen while it judges, and only then."""
    both["critic"].requires_grad_(requires_grad=False)
    loss = (both["critic"](both["net"](batch[0]) + batch[0]) - batch[1]).square().mean()
    both["critic"].requires_grad_(requires_grad=True)
    return loss


def with_follower() -> Any:
    return nn.ModuleDict({"net": network(norm=True), "follower": frozen(network(norm=True))})


def only_its_scale_is_frozen() -> Any:
    model = network(norm=True)
    frozen(model[1])
    return model


@pytest.mark.parametrize(
    ("model", "step"),
    [
        (with_follower, follows),
        (with_follower, partial(follows, by_assignment=True)),
        (lambda: nn.ModuleDict({"net": network(), "critic": network(norm=True)}), adversarial),
        (only_its_scale_is_frozen, squared),
        (lambda: nn.Sequential(frozen(network(norm=True)).eval(), nn.Linear(1, 1)), squared),
    ],
    ids=["momentum_encoder", "momentum_encoder_of_data", "critic", "scale_only", "in_eval_mode"],
)
def test_batch_norm_that_is_meant_to_run_so_is_left_alone(model, step):
    assert not serious(found(model(), rows(), step))


# --- a scheduler at another pace than it is made for


BY_STEP = {"interval": "step"}


@pytest.mark.parametrize(
    ("make", "how", "options"),
    [
        (lambda o: CosineAnnealingLR(o, T_max=16), {}, {}),
        (lambda o: CosineAnnealingLR(o, T_max=6), BY_STEP, {"max_epochs": 6}),
        (lambda o: OneCycleLR(o, 0.1, epochs=2, steps_per_epoch=8), {}, {}),
        (lambda o: OneCycleLR(o, 0.1, total_steps=8), {}, {"accumulate_grad_batches": 2}),
    ],
)
def test_schedules_at_the_wrong_pace(make, how, options, tmp_path):
    other = "step" if how == {} else "epoch"
    finding = only(doctored(tmp_path, Paced(make, **how), loader(64), **options), "scheduler_interval")
    assert f'"interval": "{other}"' in finding.fix
    assert not serious(doctored(tmp_path, Paced(make, interval=other), loader(64), **options))


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda o: CosineAnnealingLR(o, T_max=2), {}),
        (lambda o: CosineAnnealingLR(o, T_max=100), {}),  # a short trial of a long training
        (lambda o: CosineAnnealingLR(o, T_max=4), BY_STEP),  # restarts
        (lambda o: StepLR(o, 5), {}),
        (ReduceLROnPlateau, {"monitor": "loss"}),
        (lambda o: OneCycleLR(o, 0.1, total_steps=16), BY_STEP),
    ],
)
def test_schedules_at_their_pace_are_left_alone(make, how, tmp_path):
    assert not serious(doctored(tmp_path, Paced(make, **how), loader(64)))
