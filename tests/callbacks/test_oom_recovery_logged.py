"""What a run has logged whose batches ran in parts: the values of a run on a larger device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import OOMRecovery
from tests.lightning_models import trainer

SAMPLES = 6
EACH: dict[str, Any] = {"on_step": True, "on_epoch": True}


class Logs(L.LightningModule):
    """Logs its loss in many ways, with values that are other means than it. Large batches do not fit."""

    def __init__(self, kind: str, fits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.kind, self.fits = nn.Linear(3, 1), kind, fits
        self.seen: list[int] = []
        self.n_losses: list[float] = []

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.seen.append(len(batch["x"]))
        if self.seen[-1] > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        errors = (self.net(batch["x"]).squeeze(-1) - 1).square() * batch["mask"]
        return errors, errors.sum() if self.kind == "sum" else errors.sum() / batch["mask"].sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        errors, loss = self.losses(batch)
        n_tokens = int(batch["mask"].sum())
        self.log("loss", loss, **EACH)
        if batch_idx < 4:
            self.log("constant", loss, batch_size=SAMPLES, **EACH)
        self.log("one", loss, batch_size=1, **EACH)
        self.log("total", loss, reduce_fx="sum", **EACH)
        self.log("largest", loss, reduce_fx="max", **EACH)
        self.log("least", loss, reduce_fx="min", on_step=False, on_epoch=True)
        self.log("of_step", loss, on_step=True, on_epoch=False)
        self.log("n_tokens", float(n_tokens), reduce_fx="sum", **EACH)
        self.log("per_token", errors.sum() / n_tokens, batch_size=n_tokens, **EACH)
        if batch_idx == 0:  # the batches that run in parts later leave it alone
            self.log("of_first", loss, **EACH)
        if self.kind == "sum":
            self.log("per_sample", errors.sum(1).mean(), **EACH)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.n_losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        errors, loss = self.losses(batch)
        if self.kind == "sum":  # nothing tells that it is one, in evaluation
            loss = errors.sum(1).mean()
        self.log("val", loss)
        self.log("val_sum", errors.sum(), reduce_fx="sum")
        return loss

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.n_losses.append(float(outputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def tokens(batch):
    return batch["mask"].sum()


def run(root: Any, kind: str, fits: int, n_accumulated: int) -> tuple[Logs, dict[str, float]]:
    generator = torch.Generator().manual_seed(1)
    data: Any = []
    for n in (4, SAMPLES, SAMPLES, SAMPLES, 5):
        lengths = torch.randint(1, 6, (n, 1), generator=generator)
        data.append({"x": torch.randn(n, 5, 3, generator=generator), "mask": (torch.arange(5) < lengths).float()})
    data[2]["mask"][: SAMPLES // 2] = 0  # a part without any token
    given: dict[str, Any] = {"loss": "sum"} if kind == "sum" else {"loss_weight": tokens, "loss": "mean"}
    recovery = OOMRecovery(on_recover="ignore", max_splits=4, **given)
    model, loader = Logs(kind, fits), DataLoader(data, batch_size=None)
    trainer_ = trainer(root, recovery, logger=False, num_sanity_val_steps=0, accumulate_grad_batches=n_accumulated)
    trainer_.fit(model, loader, loader)
    return model, {name: float(value) for name, value in trainer_.callback_metrics.items()}


@pytest.mark.parametrize("kind", ["sum", "tokens"])
@pytest.mark.parametrize("n_accumulated", [1, 3])
def test_values_are_those_of_whole_batches_whatever_the_loss_is_a_mean_over(kind, n_accumulated, tmp_path):
    larger, expected = run(tmp_path, kind, 99, n_accumulated)
    model, logged = run(tmp_path, kind, 4, n_accumulated)
    assert larger.seen == [4, 6, 6, 6, 5] * 2
    parts = [3, 3]
    # A part without any token is left out of training.
    training = [4, 6, *parts, *(parts if kind == "sum" else [3]), *parts, 5, 2, 3]
    assert model.seen == [*training, 4, 6, *parts, *parts, *parts, 5, 2, 3]
    assert logged.keys() == expected.keys()
    assert logged == pytest.approx(expected, rel=1e-5)
    assert model.n_losses == pytest.approx(larger.n_losses, rel=1e-5)


class Errors(L.LightningModule):
    """Logs what `log_errors` logs of the errors of its samples."""

    def __init__(self, log_errors: Any, kind: str, fits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.log_errors, self.kind, self.fits = nn.Linear(3, 1), log_errors, kind, fits
        self.of_steps: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.stack([image.mean((1, 2)) for image in batch[0]]) if not isinstance(batch, Tensor) else batch
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        errors = (self.net(x) - 1).square()
        loss = {"mean": errors.mean(), "sum": errors.sum(), "sum of shape [1]": errors.sum(0)}[self.kind]
        self.log_errors(self, errors[:, 0], loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        values = self.trainer.callback_metrics.items()
        self.of_steps.append({name: float(value) for name, value in values if name.endswith("_step")})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def log_all(model: Any, errors: Tensor, loss: Tensor) -> None:
    model.log("loss", loss, **EACH)
    model.log("detached", loss.detach(), **EACH)
    model.log("total", loss, reduce_fx="sum", **EACH)
    model.log_dict({"mean": errors.mean()}, **EACH)
    model.log("sum", errors.sum(), reduce_fx="sum", **EACH)
    model.log("largest", errors.max(), reduce_fx="max", **EACH)
    model.log("least", errors.min(), reduce_fx="min", **EACH)


def log_twice(model: Any, errors: Tensor, loss: Tensor) -> None:
    for added in (0, 1):
        model.log("twice", errors.mean() + added, **EACH)
        model.log("given", errors.mean() + added, batch_size=len(errors), **EACH)
        model.log("constant", errors.mean() + added, batch_size=4, **EACH)


def log_loss(model: Any, errors: Tensor, loss: Tensor) -> None:
    model.log("loss", loss, **EACH)
    model.log("mean", errors.mean(), **EACH)


def log_weighted(model: Any, errors: Tensor, loss: Tensor) -> None:
    n = (errors.detach() * 100).long().sum()
    model.log("weighted_step", (errors * errors.detach().mul(100).long()).sum() / n, batch_size=n, on_step=True)


def images(*counts: int) -> list[Any]:
    return [
        ([torch.randn(3, 4, 4) for _ in range(n)], [{"boxes": torch.randn(2, 4)} for _ in range(n)]) for n in counts
    ]


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize(
    ("log_errors", "kind", "sizes", "fits"),
    [
        (log_all, "sum", (1, 4), 1),  # of one sample, mean and sum are the same
        (log_all, "mean", (1, 4), 1),
        (log_all, "sum", (2, 5), 2),
        (log_twice, "mean", (2, 4, 2), 2),  # 2 parts of 2, and twice 2 is 4
        (log_loss, "mean", images, 4),  # Lightning takes the 3 channels for the size
        (log_loss, "sum of shape [1]", (2, 4), 2),
        (log_weighted, "mean", (2, 4), 2),
    ],
)
def test_whatever_else_is_logged_is_that_of_whole_batches(log_errors, kind, sizes, fits, tmp_path):
    logged = []
    for n in (99, fits):
        torch.manual_seed(1)
        data: Any = images(4, 5, 4) if sizes is images else [torch.randn(size, 3) for size in sizes]
        recovery = OOMRecovery(on_recover="ignore", loss=kind.partition(" ")[0])
        model, run_ = Errors(log_errors, kind, n), trainer(tmp_path, recovery, logger=False)
        run_.fit(model, DataLoader(data, batch_size=None))
        logged.append([*model.of_steps, {name: float(value) for name, value in run_.callback_metrics.items()}])
        assert recovery.recoveries.n_recovered == (n != 99)
    for whole, parts in zip(*logged, strict=True):
        assert parts == pytest.approx(whole, rel=1e-5)
