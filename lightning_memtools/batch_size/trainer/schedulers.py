"""Learning-rate schedulers that were made for another number of steps, renewed in the middle of training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_memtools.state.random_state import RandomState

# Where a scheduler stands, and not what it is.
_POSITION = {"_step_count", "last_epoch", "_last_lr", "_get_lr_called_within_step", "_is_initial"}
_POINTS = 64


def renew_schedulers(trainer: Trainer) -> bool:
    """Replace schedulers that depend on the number of steps; whether any was replaced.

    The new one stands where it would if all epochs so far had had the present batch size. Optimizers keep their state.
    A scheduler that steps once per epoch, or does not depend on the number of steps, goes on as it is.
    """
    if not trainer.lightning_module.automatic_optimization:
        return False
    strategy: Any = trainer.strategy
    optimizers, old = list(strategy.optimizers), list(strategy.lr_scheduler_configs)
    numbers = RandomState.now()
    strategy.setup_optimizers(trainer)
    numbers.restore()
    fresh, new = list(strategy.optimizers), list(strategy.lr_scheduler_configs)
    strategy.optimizers = optimizers
    steps = trainer.current_epoch * math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    renewed = False
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        by_step = before.interval == "step" and not before.reduce_on_plateau
        if not by_step or _is_alike(before.scheduler, after.scheduler, trainer.estimated_stepping_batches):
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before")
            for _ in range(steps // before.frequency):
                after.scheduler.step()
        for theirs, ours in zip(fresh, optimizers, strict=True):
            if after.scheduler.optimizer is theirs:
                _move(after.scheduler, theirs, ours)
        old[index] = after
        renewed = True
    strategy.lr_scheduler_configs = old
    return renewed


def _is_alike(one: Any, other: Any, n_steps: float) -> bool:
    """Whether two schedulers differ in nothing but where they stand."""
    if isinstance(one, LambdaLR) and isinstance(other, LambdaLR):
        # Functions are no part of a state; what they give is compared.
        points = [int(n_steps * i / _POINTS) for i in range(_POINTS)] if math.isfinite(n_steps) else range(_POINTS)
        pairs = zip(one.lr_lambdas, other.lr_lambdas, strict=True)
        return all(f(point) == g(point) for f, g in pairs for point in points)
    return bool(_without_position(one.state_dict()) == _without_position(other.state_dict()))


def _without_position(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _without_position(value) for key, value in state.items() if key not in _POSITION}
    if isinstance(state, Sequence) and not isinstance(state, str):
        return [_without_position(value) for value in state]
    return state


def _move(scheduler: Any, source: Optimizer, target: Optimizer) -> None:
    """Have a scheduler, with those that it is made of, set another optimizer's rates."""
    for group, into in zip(source.param_groups, target.param_groups, strict=True):
        into.update({key: value for key, value in group.items() if key != "params"})
    waiting = [scheduler]
    while waiting:
        one = waiting.pop()
        if getattr(one, "optimizer", None) is source:
            one.optimizer = target
        waiting += getattr(one, "_schedulers", [])
