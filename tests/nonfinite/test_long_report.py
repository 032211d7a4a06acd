"""The report of a step with many bad gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memtools import HaltOnNaN, NonFiniteError
from tests.lightning_models import Regression, loader, trainer


class Deep(Regression):
    """23 gradients are NaN."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(11)), nn.Linear(4, 1, bias=False))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * torch.nan


def test_of_many_bad_gradients_the_first_eight_are_listed(tmp_path):
    with pytest.raises(NonFiniteError):
        trainer(tmp_path, HaltOnNaN(directory=str(tmp_path))).fit(Deep(), loader())
    table = (tmp_path / "nonfinite-step0-report.md").read_text().partition("bad gradient")[2]
    assert table.count("| net.") == 8
    assert table.strip().endswith("and 15 more")
