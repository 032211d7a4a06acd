"""Every sentence with advice that OOMRecovery can print, printed by a run and followed there: the run is then right.

That of allow_batch_norm=True is in tests/callbacks/test_oom_recovery.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memtools import OOMRecovery
from tests.callbacks.recovery_runs import Steps
from tests.recovery.test_step_recovery import UNEQUAL, n_graphs, on_graphs, parts_of, puts, refusal


class Rows(nn.Module):
    """The mean of a loss over rows; it may write its batch."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.head, self.writes = nn.Linear(8, 1), writes

    def forward(self, batch: Any) -> Tensor:
        x = batch["x"].div_(255) if self.writes else puts(dict(batch, y=None))[0]
        return F.mse_loss(self.head(x), batch["y"])


def rows(n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.rand(n, 8, generator=generator) * 255, "y": torch.rand(n, 1, generator=generator)}


def on_rows(fits: int, *, writes: bool = False, **options: Any) -> Steps:
    torch.manual_seed(0)
    return Steps(Rows(writes=writes), lambda batch: len(batch["x"]), fits, **options)


@dataclass
class Advice:
    """A sentence, a run that prints it, and the same run after it was followed."""

    words: str
    refused: Callable[[], Steps]
    mended: Callable[[], Steps]
    batch: Any


ADVICE = [
    *(
        Advice(words, partial(on_graphs, **options), partial(on_graphs, split=parts_of, loss_weight=n_graphs), UNEQUAL)
        for words, options in (
            ("pass split_batch=, a function (batch, n_parts) that returns the parts", {}),
            ("and loss_weight=, a function that counts the samples", {"split": parts_of}),
            ("pass split_batch=", {"loss_weight": n_graphs}),
        )
    ),
    Advice(
        "let the step make a new tensor", lambda: on_rows(4, writes=True), lambda: on_rows(4, writes=False), rows(8)
    ),
    Advice("a larger max_splits may help", lambda: on_rows(1), lambda: on_rows(1, max_splits=16), rows(16)),
]


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.words[:30])
def test_a_refused_step_is_right_once_the_advice_is_followed(advice):
    assert advice.words in refusal(advice.refused(), advice.batch)
    run = advice.mended()
    assert run.step(advice.batch) < 1e-4
    assert run.recovery.recoveries.n_recovered == 1


@pytest.mark.parametrize("options", [{}, {"split": parts_of}, {"loss_weight": n_graphs}])
def test_what_the_batch_needs_is_told_after_the_first_step_already(options):
    run = on_graphs(**options)
    run.run(UNEQUAL.__class__(UNEQUAL.nodes[:4], UNEQUAL.graph[:4], UNEQUAL.target[:2]))
    assert run.told[0] == refusal(run, UNEQUAL)[:-1]  # without the full stop


@pytest.mark.parametrize(
    ("arguments", "words", "mended"),
    [
        ({}, 'Pass loss="mean" or loss="sum"', {"loss": "sum"}),
        ({}, "or loss_weight=, a function", {"loss_weight": len}),
        ({"loss": "sum", "loss_weight": len}, 'or give loss="mean"', {"loss": "mean", "loss_weight": len}),
        ({"loss": "sum", "loss_weight": len}, "Leave it out", {"loss": "sum"}),
        ({"loss": "mean", "max_splits": 1}, "at least 2", {"loss": "mean", "max_splits": 2}),
    ],
)
def test_refused_arguments_are_accepted_once_the_advice_is_followed(arguments, words, mended):
    with pytest.raises(ValueError, match=words):
        OOMRecovery(**arguments)
    assert OOMRecovery(**mended).loss in {"mean", "sum"}
