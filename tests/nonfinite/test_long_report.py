"""The report of a step with many bad gradients, in which many layers keep what they have computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memtools import HaltOnNaN, NonFiniteError
from tests.lightning_models import Regression, loader, trainer


class Keeps(nn.Linear):
    kept = torch.zeros(1)

    def forward(self, x):
        self.kept = super().forward(x).detach()
        return super().forward(x)


class Deep(Regression):
    """23 gradients are NaN, and 11 layers write an attribute."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(Keeps(4, 4) for _ in range(11)), nn.Linear(4, 1, bias=False))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if batch_idx == 1 else loss


def test_a_long_report_names_the_first_and_counts_the_others(tmp_path):
    with pytest.raises(NonFiniteError):
        trainer(tmp_path, HaltOnNaN(directory=str(tmp_path))).fit(Deep(), loader())
    report = (tmp_path / "nonfinite-step1-report.md").read_text()
    assert "net.2.weight (16 NaN of 16, 100%) and 18 more" in report
    assert "net.2.kept and 8 more" in report
    assert "net.3.kept" not in report
