"""Advice that is checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.oom.actions import Action, ActionKind
from lightning_memtools.oom.advice_checks import Advice, advice_for
from lightning_memtools.oom.failed_step import FailedRun, FailedStep
from lightning_memtools.oom.failure_facts import FailureFacts, FailureMoment, off_device

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")


def failed_on(
    model: nn.Module, batch: torch.Tensor, capacity: int | None, *, cuda: bool = False, facts: Any = None, **run: Any
) -> FailedStep:
    stats = MemoryStats(allocated=100, reserved=200, capacity=capacity)
    split = None if capacity is None else dict.fromkeys(CATEGORIES, 0)
    more: dict[str, Any] = {
        "moment": FailureMoment("train", 0, 0, "forward"),
        "device": "here",
        "stats": stats,
        "split": split,
    }
    defaults: dict[str, Any] = {"optimizers": (torch.optim.Adam(model.parameters()),)}
    failed_run = FailedRun(model=model, **(defaults | run))
    all_facts = FailureFacts(**(more | {"batch": off_device(batch)} | (facts or {})))
    return FailedStep(facts=all_facts, run=failed_run, cuda=cuda, is_cuda_like=cuda)


def advice_on(model: nn.Module, batch: torch.Tensor, capacity: int | None, **options: Any) -> Advice:
    return advice_for(failed_on(model, batch, capacity, **options), 600.0)


def of_kind(advice: Advice, kind: ActionKind) -> list[Action]:
    return [action for action in advice.actions if action.kind == kind]
