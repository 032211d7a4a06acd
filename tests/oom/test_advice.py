"""Where nobody knows what a device has, changes still show by how much they lower the peak."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.oom.advice_checks import AdviceChecks
from lightning_memtools.oom.failed_step import FailedRun, FailedStep
from lightning_memtools.oom.failure_facts import (
    CATEGORIES,
    FailureFacts,
    FailureMoment,
    MemoryGrowth,
    MemorySplit,
    sizes_only,
)
from lightning_memtools.oom.other_optimizers import smaller_states
from lightning_memtools.oom.report_page import ActionKind
from lightning_memtools.oom.step_trials import NOT_REACHED, Deadline, OutOfTimeError, StepTrials
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


class Weighty(L.LightningModule):
    """Weights, and activations of a few layers, both of a size that can be chosen."""

    def __init__(self, n_layers: int = 6, width: int = 1024, *, norm: bool = False) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(n_layers)]
        self.norm = nn.BatchNorm1d(width) if norm else None
        self.net = nn.Sequential(*blocks)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x = self.net(batch)
        return (x if self.norm is None else self.norm(x)).square().mean()


def loss_of_step(model: Any, batch: Any) -> Any:
    return model.training_step(batch)


def checks_of(
    model: nn.Module, batch: torch.Tensor, capacity: int | None, *, cuda: bool = False, **run: Any
) -> AdviceChecks:
    stats = MemoryStats(allocated=100, reserved=200, capacity=capacity)
    split = None if capacity is None else MemorySplit(dict.fromkeys(CATEGORIES, 0), 0, (), 0, exact=True)
    facts = FailureFacts(moment=FailureMoment("train", 0, 0, "forward"), device="here", stats=stats, split=split,
                         batch=sizes_only(batch))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    failed_run = FailedRun(model=model, forward=loss_of_step, optimizers=(optimizer,), **run)
    checks = AdviceChecks(FailedStep(facts=facts, run=failed_run, cuda=cuda, is_cuda_like=cuda), Deadline(600.0))
    checks.run()
    return checks


MIB = 2**20


def test_where_batchnorm_refuses_one_sample_the_advice_is_checked_all_the_same() -> None:
    model = Weighty(2, 64, norm=True)
    for capacity, size in ((None, 7), (4 * MIB, 4096)):
        checks = checks_of(model, torch.ones(size, 64), capacity)
        assert [action for action in checks.actions if not action.checked] == []
    assert "Accumulate gradients" in " ".join(action.title for action in checks.actions)


def test_where_nothing_is_enough_by_itself_combinations_are_tried_the_cheapest_first() -> None:
    model = Weighty()
    n_bytes = sum(one.numel() * 4 for one in model.parameters())  # 24 MiB: with Adam 96 MiB
    plain = checks_of(model, torch.ones(4096, 1024), 100_000 * MIB)
    assert not any(action.kind == ActionKind.COMBINATION for action in plain.actions)
    # Neither one sample nor another optimizer fits by itself: both together do.
    checks = checks_of(model, torch.ones(4096, 1024), int(4.6 * n_bytes) - 26 * MIB)
    singles = [one for one in checks.actions if one.kind not in {ActionKind.COMBINATION, ActionKind.LARGER_GPU}]
    assert not any(action.fits for action in singles)
    together = [action for action in checks.actions if action.kind == ActionKind.COMBINATION]
    assert together
    assert all(action.fits for action in together)
    assert checks.actions[0].kind == ActionKind.COMBINATION
    assert "use an optimizer with a smaller state" in together[0].title
    # With less than the weights and gradients, nothing helps, and that is said.
    (none,) = [one for one in checks_of(model, torch.ones(64, 1024), n_bytes).actions
               if one.kind == ActionKind.COMBINATION]  # fmt: skip
    assert none.fits is False
    assert "not enough together" in none.detail


def of_kind(checks: AdviceChecks, kind: ActionKind) -> list[Any]:
    return [action for action in checks.actions if action.kind == kind]


def test_states_of_8_bit_are_those_of_bitsandbytes() -> None:
    model = nn.Linear(1024, 64)  # its bias is too small to be kept in 8 bits
    (optimizer, _) = smaller_states(torch.optim.AdamW(model.parameters()))
    assert optimizer.code == "bitsandbytes.optim.AdamW8bit(parameters, ...)"
    made = optimizer.make(list(model.parameters()))
    for _ in range(2):
        model(torch.ones(2, 1024)).sum().backward()
        made.step()
    states = [tensor for state in made.state.values() for tensor in state.values()]
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in states)
    assert n_bytes == 2 * 65536 * (1 + 4 / 256) + 2 * 4 * 64


def test_another_optimizer_is_tried_by_itself_with_8_bit_states_too() -> None:
    model = Weighty()
    n_bytes = sum(one.numel() * 4 for one in model.parameters())
    checks = checks_of(model, torch.ones(8, 1024), int(3.2 * n_bytes))
    eight, sgd = of_kind(checks, ActionKind.OPTIMIZER)
    assert "AdamW8bit" not in eight.code
    assert "Adam8bit" in eight.code
    assert eight.fits
    assert "bitsandbytes itself was not run" in eight.detail
    assert sgd.fits is False
    assert eight.saved - sgd.saved == pytest.approx(n_bytes / 2, rel=0.1)


def test_accumulation_with_the_fused_optimizer_is_the_cheapest_where_the_foreach_one_takes_too_much() -> None:
    model = Weighty(12)
    n_bytes = sum(one.numel() * 4 for one in model.parameters())
    checks = checks_of(model, torch.ones(4096, 1024), 5 * n_bytes, cuda=True)
    singles = [one for one in checks.actions if one.kind not in {ActionKind.COMBINATION, ActionKind.LARGER_GPU}]
    assert not any(action.fits for action in singles)
    first = of_kind(checks, ActionKind.COMBINATION)[0]
    assert first.fits
    assert "use the fused form of Adam" in first.title
    assert "torch.optim.Adam(..., fused=True)" in first.code
    assert "accumulate_grad_batches=" in first.code


def test_norms_are_recomputed_too_where_a_step_does_not_fit_without() -> None:
    class Normed(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)) for _ in range(6)]
            self.net = nn.Sequential(*blocks)

        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            return self.net(batch).square().mean()

    for capacity, code in (
        (30, 'GradientCheckpointing(bn_dropout="auto")'),
        (24, 'GradientCheckpointing(memory_budget="22MiB", bn_dropout="auto")'),
    ):
        checks = checks_of(Normed(), torch.ones(8192, 64), capacity * MIB)
        (action,) = of_kind(checks, ActionKind.CHECKPOINTING)
        assert (action.code, action.fits) == (code, True)


def test_a_search_for_the_least_recomputation_that_was_not_reached_is_named(monkeypatch) -> None:
    def no_time(_: StepTrials) -> None:
        raise OutOfTimeError(NOT_REACHED)

    monkeypatch.setattr(StepTrials, "plan_that_fits", no_time)
    checks = checks_of(Weighty(), torch.ones(4096, 1024), 250 * MIB)
    plan, least = sorted(of_kind(checks, ActionKind.CHECKPOINTING), key=lambda one: not one.checked)
    assert plan.fits
    assert (least.title, least.detail) == ("Recompute only as much as is needed to fit", NOT_REACHED)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Any) -> Any:
        return x + self.two(torch.nn.functional.gelu(self.one(x)))


def test_repeated_blocks_are_recomputed_where_there_is_no_sequential() -> None:
    class Listed(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))

        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            for block in self.blocks:
                batch = block(batch)
            return batch.square().mean()

    checks = checks_of(Listed(), torch.ones(8192, 64), 48 * MIB)
    (action,) = [action for action in checks.actions if action.kind == ActionKind.CHECKPOINTING]
    assert action.code == "GradientCheckpointing()"  # it finds the blocks of a list by itself
    assert "`blocks.0`" in action.title
    assert action.saved > 0
