"""Steps that change their batch before memory runs out."""

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

from tests.callbacks.recovery_runs import recovery
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


def halves(batch: PlainBatch, n_parts: int) -> list[PlainBatch]:
    return [PlainBatch(*pair) for pair in zip(batch.x.chunk(n_parts), batch.y.chunk(n_parts), strict=True)]


OWN: dict[str, Any] = {"split_batch": halves, "loss_weight": lambda batch: len(batch.x)}


@pytest.mark.parametrize(
    ("change", "make", "options"),
    [
        (puts, lambda x, y: {"x": x, "y": y}, {}),
        (puts, lambda x, y: BatchEncoding({"x": x, "y": y}), {}),
        (pops, lambda x, y: {"x": x, "y": y}, {}),
        (puts_deep, lambda x, y: {"of": {"x": [x]}, "y": y}, {}),
        (sets, PlainBatch, OWN),
    ],
    ids=["puts", "puts_in_encoding", "pops", "puts_deep", "sets"],
)
def test_items_and_attributes_that_a_failed_attempt_changed_are_restored(change, make, options, tmp_path):
    weights = []
    for fits in (99, 4):
        data: Any = [lambda pair=pair: make(*pair) for pair in batches()]
        loader: Any = DataLoader(data, batch_size=None, collate_fn=lambda made: made())
        model, recovering = Changes(change, fits), recovery(**options)
        trainer(tmp_path, recovering, logger=False).fit(model, loader)
        assert recovering.recoveries.n_recovered == (1 if fits == 4 else 0)  # the second is split from the beginning
        weights.append(model.net.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


def test_a_tensor_of_the_batch_that_was_written_in_place_is_named(tmp_path):
    data: Any = [{"x": x, "y": y} for x, y in batches()]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(tmp_path, recovery(), logger=False).fit(Changes(writes, 4), DataLoader(data, batch_size=None))
    assert 'wrote batch["x"] in place' in caught.value.__notes__[0]
