"""What a careful user met: a batch as long as a layer is wide, and an optimizer that searches."""

from __future__ import annotations

from typing import Any

import torch

from tests.nonfinite.given_loss import BAD, D, Net, batches
from tests.nonfinite.observe import error_at_halt


def narrow(m: Any, batch: Any) -> Any:
    """One unit of the layer is 0, in all samples."""
    units = m.net(batch["x"]).square().mean(0) * torch.tensor([1.0, 1, 1, batch["last"]])
    return units.log().mean()


def test_a_unit_is_not_called_a_sample_where_there_are_as_many(tmp_path):
    data = [batch | {"x": batch["x"][:D]} for batch in batches(last=lambda index: float(index != BAD))]
    error = error_at_halt(Net(narrow), data, tmp_path)
    assert error.explanation.operation == "aten.log"
    assert error.explanation.samples == ()


def second_is_nan(m: Any, batch: Any) -> Any:
    """The optimizer evaluates the loss several times in a step; in one step, the second evaluation is NaN."""
    m.n_evaluations = m.n_evaluations + 1 if batch["is_bad"] else 0
    return m.net(batch["x"]).square().mean() * (torch.nan if m.n_evaluations == 2 else 1.0)


def test_the_weights_that_an_optimizer_has_moved_within_its_step_are_not_claimed(tmp_path):
    model = Net(second_is_nan, lambda parameters: torch.optim.LBFGS(parameters, max_iter=3), n_evaluations=0)
    error = error_at_halt(model, batches(is_bad=lambda index: index == BAD), tmp_path)
    assert error.step == BAD
    assert "that evaluations of the loss in this step have moved" in str(error)
