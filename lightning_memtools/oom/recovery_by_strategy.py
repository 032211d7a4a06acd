"""Chooses how steps are run again under a Trainer's strategy, and says where they cannot be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_memtools._torch import can_reset_sharded_step, is_fsdp_module
from lightning_memtools.oom.gradient_exchange import GradientExchange, why_unsent
from lightning_memtools.oom.sharded_recovery import ShardedStepRecovery
from lightning_memtools.oom.step_recovery import StepRecovery
from lightning_memtools.reporting.strategies import strategy_family


def recovery_under(strategy: Any, model: nn.Module, *, skip_batch: bool, **options: Any) -> StepRecovery:
    """Return what runs a model's steps under a strategy; `options` are those of StepRecovery.

    Raises:
        ValueError: Steps cannot be run again under this strategy with this model.
    """
    if not _is_sharded(strategy):
        exchange = GradientExchange(strategy, agrees=skip_batch and strategy.world_size > 1)
        return StepRecovery(model, strategy.root_device, skip_batch=skip_batch, exchange=exchange, **options)
    if reason := _why_not_sharded(model):
        raise ValueError(f"OOMRecovery does not work under {type(strategy).__name__} here: {reason}.")
    return ShardedStepRecovery(model, strategy.root_device, skip_batch=skip_batch, **options)


def refuse_training(strategy: Any, *, skips_accumulated: bool, loss: str) -> None:
    """Refuse what would keep training steps of several ranks from being run again.

    Args:
        strategy: The Trainer's strategy.
        skips_accumulated: Batches may be skipped, and gradients are accumulated over several.
        loss: What is known of the loss.

    Raises:
        ValueError: It is refused; the message says why.
    """
    reason = ""
    if not _is_sharded(strategy):
        reason = why_unsent(strategy)
        if not reason and skips_accumulated and strategy.world_size > 1:
            reason = "skip_batch=True with accumulate_grad_batches: other ranks have added up gradients already"
    elif loss == "auto":
        reason = (
            'Under FSDP 2 the loss is not tried, because all ranks would have to: give loss="mean" or loss="sum", '
            "over the samples of a batch"
        )
    if reason:
        raise ValueError(f"OOMRecovery does not work here under several ranks. {reason}.")


def _is_sharded(strategy: Any) -> bool:
    return strategy_family(type(strategy)) == "ModelParallel"


def _why_not_sharded(model: nn.Module) -> str:
    if not any(map(is_fsdp_module, model.modules())):
        return "configure_model applied fully_shard to no module"
    if not can_reset_sharded_step():
        return f"torch {torch.__version__} cannot take back a failed step of fully_shard; torch 2.13 can"
    if any(isinstance(each, DTensor) and each.device_mesh.ndim > 1 for each in model.parameters()):
        return (
            "parameters are spread over a mesh of several dimensions, as for tensor parallelism or for copies of the "
            "shards; fully_shard over one dimension is served"
        )
    return ""
