"""Batches: what is in them, and which samples are bad."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_memtools.nonfinite.bad_step import NonFiniteCause
from lightning_memtools.nonfinite.finite_checks import MAX_SAMPLES, bad_inputs
from tests.nonfinite.given_loss import BAD, Net, batches
from tests.nonfinite.observe import error_at_halt


def test_bad_samples_are_counted_and_listed():
    x = torch.zeros(20, 3, 2)
    x[4, 1, 0] = torch.nan
    x[4, 1, 1] = torch.inf
    x[7, 0, 0] = -torch.inf
    (bad,) = bad_inputs({"x": x, "y": torch.arange(20)}, 5)
    assert (bad.n_nan, bad.n_inf, bad.n_elements, bad.samples, bad.is_mask) == (1, 2, 120, (4, 7), False)
    assert str(bad) == 'batch["x"] of batch 5 holds 1 NaN and 2 Inf in 120 elements, in samples 4, 7'


def test_long_lists_end():
    (bad,) = bad_inputs(torch.full((30,), torch.nan), 0)
    assert len(bad.samples) == MAX_SAMPLES + 1
    assert str(bad).endswith("in samples 0, 1, 2, 3, 4, 5, 6, 7, ...")


def test_masks_scalars_and_sparse_tensors():
    mask, number, sparse = bad_inputs(
        [torch.tensor([0.0, -torch.inf]), torch.tensor(torch.nan), torch.tensor([[torch.nan]]).to_sparse()], 0
    )
    assert mask.is_mask
    assert (number.samples, number.is_mask) == ((), False)
    assert (sparse.n_nan, sparse.samples) == (1, ())
    assert bad_inputs(None, 0) == []


def adds(m: Any, batch: Any) -> Any:
    """As schnetpack's models do, which put their results into the batch."""
    batch["share"] = m.net(batch["x"]) * (batch["x"] / batch["x"].norm(dim=1, keepdim=True))
    return batch["share"].square().mean()


def replaces(m: Any, batch: Any) -> Any:
    batch["x"] = batch["x"] / batch["x"].norm(dim=1, keepdim=True)
    return m.net(batch["x"]).square().mean()


def overwrites(m: Any, batch: Any) -> Any:
    loss = m.net(batch["x"].div_(batch["x"].norm(dim=1, keepdim=True))).square().mean()
    m.seen.update(loss.detach().nan_to_num())
    return loss


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("loss", [adds, replaces, overwrites])
def test_what_a_step_writes_into_its_batch_or_a_metric_is_not_blamed_on_them(loss, accumulate, tmp_path):
    data = [*batches(), *batches()]
    data[-BAD]["x"][3] = 0.0
    error = error_at_halt(Net(loss, seen=MeanMetric()), data, tmp_path, options={"accumulate_grad_batches": accumulate})
    bad = error.explanation
    assert bad is not None
    assert (error.cause, bad.operation.rstrip("_"), bad.samples) == (NonFiniteCause.DOMAIN, "aten.div", (3,))
    assert (bad.inputs, bad.unrestored, bad.doubts) == ((), (), ())
