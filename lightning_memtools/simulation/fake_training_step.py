"""Lets a LightningModule's own training_step run on a copy with fake tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves


class _AnyOptimizer:
    """Stands for an optimizer in manual optimization: it changes nothing, for weights do not matter here."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 1.0, "params": []}]

    def __getattr__(self, name: str) -> Any:
        if name == "toggle_model":
            return _nothing
        return _ignore


class _LocalBatchNorm(_BatchNorm):
    """SyncBatchNorm without other ranks: one rank plans alone."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002, torch's name
        del input


def forward_of(trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> Callable[[nn.Module, Any], Any]:
    """The forward pass of the present training batch, to be run with a fake copy of the module and the batch."""
    takes_index = len(inspect.signature(pl_module.training_step).parameters) > 1
    automatic = pl_module.automatic_optimization
    n_optimizers = len(trainer.optimizers)

    def forward(model: nn.Module, batch: Any) -> Any:
        assert isinstance(model, LightningModule)
        _stand_alone(model, trainer, n_optimizers)
        with _precision(trainer):
            out = model.training_step(batch, batch_idx) if takes_index else model.training_step(batch)
        if not automatic:
            return None
        return out["loss"] if isinstance(out, dict) else out

    return forward


def _stand_alone(model: LightningModule, trainer: Trainer, n_optimizers: int) -> None:
    """Make a copy log nothing, talk to nobody and step no optimizer."""
    model.trainer = trainer
    optimizers = [_AnyOptimizer() for _ in range(n_optimizers)]
    # Into the instance's dict: a Module's own way of setting attributes is for parameters.
    vars(model).update(
        log=_ignore,
        log_dict=_ignore,
        optimizers=lambda **_: optimizers if n_optimizers > 1 else (optimizers or [_AnyOptimizer()])[0],
        lr_schedulers=_ignore,
        manual_backward=_backward,
        toggle_optimizer=_ignore,
        untoggle_optimizer=_ignore,
        clip_gradients=_ignore,
        all_gather=lambda data, *_, **__: data,
    )
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _LocalBatchNorm  # type: ignore[assignment]


def _precision(trainer: Trainer) -> AbstractContextManager[Any]:
    plugin = copy.copy(trainer.precision_plugin)
    if isinstance(plugin, MixedPrecision):
        plugin.device = "cpu"  # where the copy is, whatever the device of the run
    return plugin.train_step_context()


def _backward(loss: Any, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    for one in tree_leaves(loss):
        if isinstance(one, Tensor) and one.requires_grad:
            one.backward()  # type: ignore[no-untyped-call]


def _ignore(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    del args, kwargs
    yield
