"""Where nobody knows what a device has, changes still show by how much they lower the peak."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memtools._torch import has_kernel
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.planning import StepPlanner
from lightning_memtools.estimate import estimate_memory
from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.oom import combined_advice
from lightning_memtools.oom.advice_checks import AdviceChecks
from lightning_memtools.oom.deadline import NOT_REACHED, Deadline, OutOfTimeError
from lightning_memtools.oom.failed_step import FailedRun, FailedStep
from lightning_memtools.oom.failure_facts import (
    FailureFacts,
    FailureMoment,
    MemoryGrowth,
    sizes_only,
)
from lightning_memtools.oom.other_optimizers import EightBitStates, fused_form, smaller_states
from lightning_memtools.oom.plan_trials import PlanTrials
from lightning_memtools.oom.report_page import ActionKind
from lightning_memtools.oom.step_trials import StepTrials
from tests.oom.advice_runs import checks_of, failed_on
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
    assert "may or may not fit" in grows.detail
    half = by_title["Use training batches of 2 instead of 4"]
    assert half.detail == "The peak falls by 14.0 MiB to 14.0 MiB. Whether that is enough is not known"
    assert checks.modules[0] == ("net.4.0", 6 * 2**20)
    # No GPU, no history: nothing of those.
    assert not {"Use a larger GPU", "Use expandable segments", "Stop other processes"} & set(by_title)


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
    assert "replace Adam with" in together[0].title
    # With less than the weights and gradients, nothing helps, and that is said.
    (none,) = [one for one in checks_of(model, torch.ones(64, 1024), n_bytes).actions
               if one.kind == ActionKind.COMBINATION]  # fmt: skip
    assert none.fits is False
    assert "That is not enough together" in none.detail


def of_kind(checks: AdviceChecks, kind: ActionKind) -> list[Any]:
    return [action for action in checks.actions if action.kind == kind]


def test_states_of_8_bit_are_those_of_bitsandbytes() -> None:
    model = nn.Linear(1024, 64)  # its bias is too small to be kept in 8 bits
    (optimizer, _) = smaller_states(torch.optim.AdamW(model.parameters()))
    assert optimizer.code == "bitsandbytes.optim.AdamW8bit(parameters, ...)"
    assert not isinstance(optimizer.make, torch.optim.Optimizer)
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
    assert "the fused form of Adam" in first.title
    (eight,) = [one for one in of_kind(checks, ActionKind.COMBINATION) if "Adam8bit" in one.code]
    assert eight.detail.endswith("bitsandbytes itself was not run")
    assert "torch.optim.Adam(..., fused=True)" in first.code
    assert "accumulate_grad_batches=" in first.code


def test_a_fused_optimizer_is_not_advised_where_lightning_refuses_to_clip_for_it() -> None:
    class Mixed(Weighty):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            return self.net(batch).float().square().mean()

    found = {}
    for clip in (1.0, None):
        model = Mixed(4)
        n_bytes = sum(one.numel() * 4 for one in model.parameters())
        capacity = int(4.9 * n_bytes)
        checks = checks_of(model, torch.ones(8, 1024), capacity, cuda=True, precision="16-mixed", clip=clip)
        found[clip] = " ".join(action.code for action in checks.actions)
    assert "fused=True" in found[None]
    assert "fused=True" not in found[1.0]


def test_bitsandbytes_is_not_advised_for_amsgrad_which_it_refuses() -> None:
    checks = checks_of(Weighty(2), torch.ones(8, 1024), None, amsgrad=True)
    (action,) = of_kind(checks, ActionKind.OPTIMIZER)
    assert "SGD" in action.code


class Gains(L.LightningModule):
    """Parameters that are too small to have states of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(4000)) for _ in range(40))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return sum(batch.mul(gain).sum() for gain in self.gains)


def test_the_smallest_state_comes_first_whatever_the_size_of_the_parameters() -> None:
    for model, is_eight in ((Weighty(1), True), (Gains(), False)):
        first, second = (one.make for one in smaller_states(torch.optim.Adam(model.parameters())))
        assert (first is EightBitStates, second is EightBitStates) == (is_eight, not is_eight)


def test_combinations_take_the_state_that_is_the_smallest_for_small_parameters() -> None:
    # With one sample a step reserves 2 MiB with SGD and 4 with states of 8 bits, which are none for small parameters.
    checks = checks_of(Gains(), torch.ones(256, 4000), 3 * MIB)
    first = of_kind(checks, ActionKind.COMBINATION)[0]
    assert first.fits
    assert "SGD" in first.code


def test_a_check_that_runs_out_of_time_keeps_what_it_had_found(monkeypatch) -> None:
    model = Weighty(12)
    n_bytes = sum(one.numel() * 4 for one in model.parameters())
    estimate, action_of = FailedStep.estimate, combined_advice._action
    is_over = False

    def until_the_time_is_over(self: FailedStep, size: int | None = None, **changes: Any) -> Any:
        only_sgd = list(changes) == ["optimizer"] and getattr(changes["optimizer"], "__name__", "") == "_sgd"
        if is_over or only_sgd:
            raise OutOfTimeError(NOT_REACHED)
        return estimate(self, size, **changes)

    def then_it_is_over(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_over
        is_over = True
        return action_of(*args, **kwargs)

    monkeypatch.setattr(FailedStep, "estimate", until_the_time_is_over)
    monkeypatch.setattr(combined_advice, "_action", then_it_is_over)
    checks = checks_of(model, torch.ones(4096, 1024), 5 * n_bytes, cuda=True)
    for kind, kept in ((ActionKind.OPTIMIZER, "Adam8bit"), (ActionKind.COMBINATION, "fused=True")):
        found, left = sorted(of_kind(checks, kind), key=lambda one: not one.checked)
        assert kept in found.code
        assert (left.checked, left.detail) == (False, NOT_REACHED)


def test_norms_are_recomputed_too_where_a_step_does_not_fit_without() -> None:
    class Normed(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)) for _ in range(6)]
            self.net = nn.Sequential(*blocks)

        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            return self.net(batch.view(-1, 64)).square().mean()

    for capacity, budget in ((30, 21), (24, 21)):  # the plan for a budget of 22 MiB, the largest that fits, is the same
        checks = checks_of(Normed(), torch.ones(1, 8192, 64), capacity * MIB)
        (action,) = of_kind(checks, ActionKind.CHECKPOINTING)
        assert action.code == f'GradientCheckpointing(memory_budget="{budget}MiB", bn_dropout="auto")'
        assert action.fits
        assert action.detail.startswith("With 13% more computation")  # without a budget it is 25%
        assert of_kind(checks, ActionKind.COMBINATION) == []  # a single change is enough


class Mlps(Weighty):
    """Blocks whose layers cost and hold different amounts."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__(0)
        layers = [(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(n_blocks)]
        self.net = nn.Sequential(*[nn.Sequential(*block) for block in layers])


def test_the_search_for_the_least_recomputation_finds_the_largest_budget_with_which_the_step_fits():
    """The allocator reserves so much more than tensors hold that only budgets far below the capacity fit."""
    trials = StepTrials(failed_on(Mlps(4), torch.ones(2048, 128), 40 * MIB), Deadline(600.0))
    found = trials.plans.that_fits()
    planner, fitting = StepPlanner(trials.failed.step()), {}
    for budget in range(40, 33, -1):  # smaller ones cost no less
        plan = planner.plan(CheckpointOptions.parse(memory_budget=f"{budget}MiB"))
        if trials.fits(trials.failed.estimate(plan=plan)):
            fitting[budget] = plan.extra_operations
    assert found.code == f'GradientCheckpointing(memory_budget="{max(fitting)}MiB")'
    assert max(fitting) < 0.9 * 40
    assert found.plan.extra_operations == min(fitting.values())


def test_a_plan_that_recomputes_next_to_nothing_comes_before_the_one_that_is_made_without_a_budget() -> None:
    checks = checks_of(Mlps(8), torch.ones(1024, 128), 60 * MIB)
    first = checks.actions[0]
    assert "GradientCheckpointing(memory_budget=" in first.code
    assert first.detail.startswith("With less than 1% more computation")
    without_budget = StepTrials(failed_on(Mlps(8), torch.ones(1024, 128), 60 * MIB), Deadline(600.0)).plans.best
    assert without_budget.code == "GradientCheckpointing()"
    assert without_budget.plan.extra_operations > 0.2


def test_where_the_least_recomputation_is_not_reached_the_plan_without_a_budget_stays(
    monkeypatch,
) -> None:
    def no_time(_: PlanTrials) -> None:
        raise OutOfTimeError(NOT_REACHED)

    monkeypatch.setattr(PlanTrials, "that_fits", no_time)
    checks = checks_of(Weighty(), torch.ones(4096, 1024), 250 * MIB)
    (plan,) = of_kind(checks, ActionKind.CHECKPOINTING)
    assert (plan.fits, plan.code) == (True, "GradientCheckpointing()")


def test_a_loss_in_chunks_that_was_not_reached_in_time_is_not_taken_for_none(monkeypatch) -> None:
    trials = StepTrials(failed_on(Mlps(4), torch.ones(64, 128), 40 * MIB), Deadline(600.0))

    def no_time(_: Deadline) -> None:
        raise OutOfTimeError(NOT_REACHED)

    monkeypatch.setattr(Deadline, "check", no_time)
    with pytest.raises(OutOfTimeError):
        _ = trials.plans.in_chunks


def test_plans_for_layers_that_run_several_times_are_found() -> None:
    """A profile counts a layer's first call only: what it says about the least peak is far too high."""

    class Repeated(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())

        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            for _ in range(12):
                batch = batch + self.net(batch)
            return batch.square().mean()

    found = checks_of(Repeated(), torch.ones(8192, 64), 90 * MIB)
    (action,) = [one for one in of_kind(found, ActionKind.CHECKPOINTING) if one.fits]
    assert "memory_budget=" in action.code


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
    assert "blocks.*" in action.title
    assert action.saved > 0


def test_the_fused_form_keeps_the_settings_of_each_group_and_learning_rates_that_are_tensors():
    model = Weighty(2, 64)
    groups: list[dict[str, Any]] = [
        {"params": list(model.net[0].parameters())},
        {"params": list(model.net[1].parameters()), "amsgrad": True},
    ]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(1e-3), capturable=True)
    fused = fused_form(optimizer)
    made = estimate_memory(model, torch.ones(4, 64), optimizer=fused.make, accumulate=2, precision="bf16-mixed")
    matrix, bias = 4 * 64 * 64, 512  # blocks are multiples of 512 bytes
    states = (2 + 3) * (matrix + bias) + 4 * 512  # of four parameters; amsgrad has a third, and each a count
    assert max(made.timeline.parts["optimizer"]) == states
    assert not any(group["fused"] for group in optimizer.param_groups)


def test_a_fused_adagrad_is_advised_only_where_torch_has_its_kernel_for_the_gpu() -> None:
    found = fused_form(torch.optim.Adagrad(Weighty(2).parameters()))
    assert (found is not None) == has_kernel("aten::_fused_adagrad_", "CUDA")


def test_two_optimizers_with_smaller_states_have_titles_of_their_own() -> None:
    first, second = smaller_states(torch.optim.AdamW(Weighty(2).parameters()))
    assert first.title.startswith("Replace AdamW with AdamW8bit")
    assert second.title.startswith("Replace AdamW with SGD")
