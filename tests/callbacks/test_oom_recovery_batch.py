"""Steps that change their batch, or call another step, and then run out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from lightning_memtools import OOMRecovery
from tests.lightning_models import trainer


@dataclass
class PlainBatch:
    """A batch of a class of the user's."""

    x: Tensor
    y: Tensor


class Changes(L.LightningModule):
    """Changes its batches in one way, before memory runs out."""

    def __init__(self, change: Any, fits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.change, self.fits = nn.Linear(3, 1), change, fits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.change(batch)
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def puts(batch: Any) -> Any:
    batch["x"] = batch["x"] / 255
    return batch["x"], batch["y"]


def pops(batch: Any) -> Any:
    y = batch.pop("y")
    return batch["x"] / 255, y


def puts_deep(batch: Any) -> Any:
    batch["of"]["x"][0] = batch["of"]["x"][0] / 255
    return batch["of"]["x"][0], batch["y"]


def sets(batch: Any) -> Any:
    batch.x = batch.x / 255
    return batch.x, batch.y


def writes(batch: Any) -> Any:
    return batch["x"].div_(255), batch["y"]


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.rand(n, 3) * 255, torch.rand(n, 1)) for n in (8, 8)]


MAKE: dict[Any, Any] = {
    puts: lambda x, y: {"x": x, "y": y},
    pops: lambda x, y: {"x": x, "y": y},
    puts_deep: lambda x, y: {"of": {"x": [x]}, "y": y},
    sets: PlainBatch,
}


@pytest.mark.parametrize("loss", ["auto", "mean"])
@pytest.mark.parametrize(("change", "make"), [*MAKE.items(), (puts, lambda x, y: BatchEncoding({"x": x, "y": y}))])
def test_items_and_attributes_that_a_failed_attempt_changed_are_restored(change, make, loss, tmp_path):
    weights = []
    for fits in (99, 4):
        data: Any = [lambda pair=pair: make(*pair) for pair in batches()]
        loader: Any = DataLoader(data, batch_size=None, collate_fn=lambda made: made())
        model, recovery = Changes(change, fits), OOMRecovery(on_recover="ignore", loss=loss)
        trainer(tmp_path, recovery, logger=False).fit(model, loader)
        assert recovery.recoveries.n_recovered == (1 if fits == 4 else 0)  # the second is split from the beginning
        weights.append(model.net.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", ["auto", "mean"])
def test_a_tensor_of_the_batch_that_was_written_in_place_is_named(loss, tmp_path):
    data: Any = [{"x": x, "y": y} for x, y in batches()]
    recovery = OOMRecovery(on_recover="ignore", loss=loss)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(tmp_path, recovery, logger=False).fit(Changes(writes, 4), DataLoader(data, batch_size=None))
    assert 'wrote batch["x"] in place' in caught.value.__notes__[0]


class Shares(Changes):
    """Its training_step is its validation_step: a mean over the pixels that a mask shows."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, mask = batch
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return ((self.net(x).squeeze(-1) - 1).square() * mask).sum() / mask.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.validation_step(batch, batch_idx)


def test_an_evaluation_step_that_training_step_calls_runs_in_the_parts_of_training(tmp_path):
    torch.manual_seed(1)
    x, mask = torch.randn(8, 5, 3), (torch.arange(5) < torch.randint(1, 6, (8, 1))).float()
    data: Any = [[x, mask]]
    weights = []
    for fits in (99, 4):
        model, recovery = Shares(None, fits), OOMRecovery(on_recover="ignore", loss_weight=lambda part: part[1].sum())
        trainer(tmp_path, recovery, logger=False).fit(model, DataLoader(data, batch_size=None))
        weights.append(model.net.weight.detach())
    torch.testing.assert_close(*weights)
    assert recovery.recoveries.latest.endswith("the mean over its samples.")
    with pytest.raises(torch.OutOfMemoryError, match="differs from the mean"):
        trainer(tmp_path, OOMRecovery(), logger=False).fit(Shares(None, 4), DataLoader(data, batch_size=None))


def test_an_error_that_only_parts_raise_names_the_lack_of_memory(tmp_path):
    def refuses_few(batch: Any) -> Any:
        assert len(batch[0]) > 4, "too few samples"
        return batch

    run, data = trainer(tmp_path, OOMRecovery(on_recover="ignore", loss="mean"), logger=False), batches()
    with pytest.raises(AssertionError, match="too few samples") as caught:
        run.fit(Changes(refuses_few, 7), DataLoader(data, batch_size=None))
    assert "OOMRecovery ran this batch in 2 parts" in caught.value.__notes__[0]
    assert "after: CUDA out of" in caught.value.__notes__[0]
    assert isinstance(caught.value.__context__, torch.OutOfMemoryError)
