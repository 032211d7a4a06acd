"""Advice that is checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.oom.advice_checks import AdviceChecks
from lightning_memtools.oom.deadline import Deadline
from lightning_memtools.oom.failed_step import FailedRun, FailedStep
from lightning_memtools.oom.failure_facts import (
    CATEGORIES,
    FailureFacts,
    FailureMoment,
    MemorySplit,
    sizes_only,
)


def loss_of_step(model: Any, batch: Any) -> Any:
    return model.training_step(batch)


def failed_on(
    model: nn.Module,
    batch: torch.Tensor,
    capacity: int | None,
    *,
    cuda: bool = False,
    amsgrad: bool = False,
    **run: Any,
) -> FailedStep:
    stats = MemoryStats(allocated=100, reserved=200, capacity=capacity)
    split = None if capacity is None else MemorySplit(dict.fromkeys(CATEGORIES, 0), 0, (), 0, exact=True)
    facts = FailureFacts(moment=FailureMoment("train", 0, 0, "forward"), device="here", stats=stats, split=split,
                         batch=sizes_only(batch))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=amsgrad)
    failed_run = FailedRun(model=model, forward=loss_of_step, optimizers=(optimizer,), **run)
    return FailedStep(facts=facts, run=failed_run, cuda=cuda, is_cuda_like=cuda)


def checks_of(model: nn.Module, batch: torch.Tensor, capacity: int | None, **options: Any) -> AdviceChecks:
    checks = AdviceChecks(failed_on(model, batch, capacity, **options), Deadline(600.0))
    checks.run()
    return checks
