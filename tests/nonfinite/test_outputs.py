"""Outputs of an evaluation run: what counts as bad, and where it began."""

from __future__ import annotations

import torch

from lightning_memtools.nonfinite.evaluation_guard import OutputWatch, bad_metrics
from lightning_memtools.nonfinite.halt_report import BadOutput


def test_the_first_bad_batch_of_each_output_is_kept():
    watch = OutputWatch()
    nan = torch.tensor(torch.nan)
    for loss, logits in ((0.0, 1.0), (0.0, torch.nan), (torch.inf, 1.0), (1.0, torch.nan)):
        watch.check({"loss": torch.tensor(loss), "logits": torch.tensor([[0.0, -torch.inf, logits]]), "count": 3})
    watch.check(None)
    watch.check({"late": nan})
    assert watch.bad_outputs() == [
        BadOutput('outputs["loss"]', 2, None),
        BadOutput('outputs["logits"]', 1, None),
        BadOutput('outputs["late"]', 5, None),
    ]


def test_good_outputs_integers_and_overflowing_norms_are_good():
    watch = OutputWatch()
    watch.check([torch.zeros(3), torch.arange(3), torch.full((100,), 1e30), torch.zeros(0), torch.tensor(2)])
    assert watch.bad_outputs() == []
    assert OutputWatch().bad_outputs() == []


def test_metrics_must_be_finite():
    metrics = {
        "good": torch.tensor(1.0),
        "nan": torch.tensor(torch.nan),
        "inf": torch.tensor([torch.inf]),
        "n": torch.tensor(3),
    }
    assert [(bad.name, bad.batch) for bad in bad_metrics(metrics)] == [("nan", None), ("inf", None)]
    assert str(bad_metrics({"val": torch.tensor(-torch.inf)})[0]) == "metric val = -inf"
