"""Where nobody knows what a device has, changes still show by how much they lower the peak."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.oom.advice_checks import AdviceChecks
from lightning_memtools.oom.failed_step import FailedRun, FailedStep
from lightning_memtools.oom.failure_facts import FailureFacts, FailureMoment, MemoryGrowth, sizes_only
from lightning_memtools.oom.step_trials import Deadline
from tests.oom_models import Layers


def loss_of(model: Any, batch: Any) -> Any:
    return model.loss(batch)


def test_without_a_capacity_nothing_is_said_to_fit() -> None:
    facts = FailureFacts(
        moment=FailureMoment("train", 3, 3, "forward"),
        device="xpu:0",
        stats=MemoryStats(allocated=100, reserved=200),
        batch=sizes_only(torch.empty(4, 8, 16384)),
        grown=MemoryGrowth(90 * 2**20, 3),
    )
    failed = FailedStep(facts=facts, run=FailedRun(model=Layers(), forward=loss_of))
    checks = AdviceChecks(failed, Deadline(600.0))
    checks.run()
    by_title = {action.title: action for action in checks.actions}
    assert all(action.checked and not action.fits for action in checks.actions)
    grows = by_title["Find what grows by 30.0 MiB a batch"]
    assert grows.detail.endswith("without them it is not known what would fit")
    half = by_title["Use training batches of 2 in place of 4"]
    assert half.detail == "minus 14.0 MiB to a peak of 14.0 MiB; whether that is enough is not known"
    assert checks.modules[0] == ("net.4.0", 6 * 2**20)
    # No GPU, no history: nothing of those.
    assert not {"Use a larger GPU", "Use expandable segments", "Stop other processes on the device"} & set(by_title)
