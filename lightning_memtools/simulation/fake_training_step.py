"""Lets a LightningModule's own training_step run on fake tensors, without moving the Trainer that it belongs to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

from torch import nn

from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.simulation.fakes import copy_optimizer
from lightning_memtools.simulation.trainer_stand_in import (
    SilentLogger,
    TrainerStandIn,
    accepted_arguments,
    attach,
)


def forward_of(trainer: Any, pl_module: Any, batch_idx: int) -> Callable[[nn.Module, Any], Any]:
    """Return a function that runs the forward pass of a training batch on a module with fake tensors.

    Args:
        trainer: The Trainer of the run. It answers for whatever the step asks of it, and is not changed.
        pl_module: Its LightningModule.
        batch_idx: The index of the batch.
    """
    automatic = pl_module.automatic_optimization
    names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
    optimizers = list(trainer.optimizers)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]

    def forward(model: Any, batch: Any) -> Any:
        fakes = dict(model.named_parameters())
        stand_in = TrainerStandIn(
            backward=_backward,
            optimizers=[
                copy_optimizer(one, lambda p: fakes.get(names.get(id(p), "")), with_state=False) for one in optimizers
            ],
            schedulers=schedulers,
            step=_do_nothing,  # whoever traces the step steps the optimizers
            module=model,
            original=trainer,
            logger=SilentLogger(),
        )
        attach(model, stand_in)
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                # One rank traces alone: it normalizes as BatchNorm does, without the other ranks.
                vars(module)["forward"] = MethodType(nn.BatchNorm1d.forward, module)
        with _precision(trainer):
            out = model.training_step(*accepted_arguments(model.training_step, batch, batch_idx))
        if not automatic:
            return None
        return out["loss"] if isinstance(out, dict) else out

    return forward


def _precision(trainer: Any) -> AbstractContextManager[Any]:
    plugin = copy.copy(trainer.precision_plugin)
    if isinstance(getattr(plugin, "device", None), str):
        plugin.device = "cpu"  # autocast acts where the fake tensors are, whatever the device of the run
    context: AbstractContextManager[Any] = plugin.train_step_context()
    return context


def _backward(loss: Any, *_args: Any, **_kwargs: Any) -> None:
    for one in tensors_in(loss):
        if one.requires_grad:
            one.backward()  # type: ignore[no-untyped-call]


def _do_nothing(_optimizer: Any) -> None:
    """Stands for an optimizer's step."""
