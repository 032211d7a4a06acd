"""The checks by themselves: what is said where something is not known, and which checkpoint plan is chosen."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, StepPlanner
from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.oom.actions import Action, ActionKind, Outcome
from lightning_memtools.oom.advice_checks import Advice, advice_for
from lightning_memtools.oom.failed_step import FailedRun, FailedStep
from lightning_memtools.oom.failure_facts import FailureFacts, FailureMoment, MemoryGrowth, off_device
from tests.oom_models import Layers

MIB = 2**20
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")


def failed_on(
    model: nn.Module, batch: torch.Tensor, capacity: int | None, *, cuda: bool = False, facts: Any = None, **run: Any
) -> FailedStep:
    stats = MemoryStats(allocated=100, reserved=200, capacity=capacity)
    split = None if capacity is None else dict.fromkeys(CATEGORIES, 0)
    more: dict[str, Any] = {"moment": FailureMoment("train", 0, 0, "forward"), "device": "here"}
    more |= {"stats": stats, "split": split}
    defaults: dict[str, Any] = {"optimizers": (torch.optim.Adam(model.parameters()),)}
    failed_run = FailedRun(model=model, **(defaults | run))
    all_facts = FailureFacts(**(more | {"batch": off_device(batch)} | (facts or {})))
    return FailedStep(facts=all_facts, run=failed_run, cuda=cuda, is_cuda_like=cuda)


def advice_on(model: nn.Module, batch: torch.Tensor, capacity: int | None, **options: Any) -> Advice:
    return advice_for(failed_on(model, batch, capacity, **options), 600.0)


def of_kind(advice: Advice, kind: ActionKind) -> list[Action]:
    return [action for action in advice.actions if action.kind == kind]


class Weighty(L.LightningModule):
    """Weights, and activations of a few layers, both of a size that can be chosen."""

    def __init__(self, n_layers: int = 6, width: int = 1024) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(n_layers)]
        self.net = nn.Sequential(*blocks)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return self.net(batch).square().mean()


def test_without_a_capacity_nothing_is_said_to_fit():
    facts = {"moment": FailureMoment("train", 3, 3, "forward"), "grown": MemoryGrowth(90 * MIB, 3)}
    advice = advice_on(Layers(), torch.empty(4, 8, 16384), None, facts=facts)
    by_title = {action.title: action for action in advice.actions}
    assert {action.outcome for action in advice.actions} <= {Outcome.MAY_BE_ENOUGH, Outcome.USELESS}
    assert "may or may not fit" in by_title["Find what grows by 30.0 MiB a batch"].detail
    half = by_title["Use training batches of 2 instead of 4"]
    assert half.detail == "The peak falls by 14.0 MiB to 14.0 MiB. Whether that is enough is not known"
    assert advice.modules[0] == ("net.4.0", 6 * MIB)
    # No GPU, no history: nothing of those.
    assert not {"Use a larger GPU", "Use expandable segments", "Stop other processes"} & set(by_title)


def test_the_state_of_the_optimizer_is_named_with_its_size_where_it_is_large():
    model = Weighty()
    n_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    (note,) = advice_on(model, torch.ones(8, 1024), None).notes
    size = parse_size(re.search(r"^The state of Adam takes (.*?)\. .* none was tried", note)[1].replace(" ", ""))
    assert size == pytest.approx(2 * n_bytes, rel=0.01)
    assert advice_on(Weighty(2, 64), torch.ones(4096, 64), None).notes == []


# --- checkpointing


class Mlps(Weighty):
    """Blocks whose layers cost and hold different amounts."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__(0)
        layers = [(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(n_blocks)]
        self.net = nn.Sequential(*[nn.Sequential(*block) for block in layers])


def plan_of(code: str, failed: FailedStep) -> Any:
    """The plan that the printed callback makes."""
    arguments = eval(code.replace("GradientCheckpointing", "dict"))  # noqa: S307, our own text
    return StepPlanner(failed.request(failed.facts.batch)).plan(CheckpointOptions.parse(**arguments))


def test_where_no_plan_fits_the_one_with_the_lowest_peak_is_shown():
    failed = failed_on(Mlps(8), torch.ones(4096, 128), 12 * MIB)
    (action,) = of_kind(advice_for(failed, 600.0), ActionKind.CHECKPOINTING)
    assert action.outcome is Outcome.NOT_ENOUGH
    assert failed.estimate(plan=plan_of(action.code, failed)).peak_allocated == action.peak
    with pytest.raises(BudgetTooSmallError) as caught:
        plan_of('GradientCheckpointing(memory_budget="12MiB")', failed)
    assert caught.value.reachable_bytes == pytest.approx(action.peak, abs=MIB)


# --- what goes wrong


def test_a_check_that_fails_costs_its_own_line_only(monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(StepPlanner, "plan", fails)
    monkeypatch.setattr("lightning_memtools.oom.change_checks.known_gpus", fails)
    advice = advice_on(Weighty(), torch.ones(4096, 1024), 250 * MIB, cuda=True)
    by_kind: dict[ActionKind, Action] = {action.kind: action for action in advice.actions}
    assert "Not checked: a larger GPU, GradientCheckpointing (KeyError: 'broken')." in advice.unchecked
    assert by_kind[ActionKind.BATCH_SIZE].outcome is Outcome.ENOUGH
