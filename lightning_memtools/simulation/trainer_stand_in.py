"""Just enough of a Trainer for a LightningModule's own step to run without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class TrainerStandIn:
    """What a LightningModule asks its Trainer for while its step runs; everything else names itself as missing.

    Args:
        optimizers: Given to ``self.optimizers()``.
        schedulers: Given to ``self.lr_schedulers()``.
        backward: Runs backward of a loss, for ``self.manual_backward``.
        stage: What the Trainer is said to do.
    """

    def __init__(
        self, optimizers: list[Optimizer], schedulers: list[Any], backward: Callable[..., None], stage: str
    ) -> None:
        self.optimizers = optimizers
        self.lr_scheduler_configs = [SimpleNamespace(scheduler=scheduler) for scheduler in schedulers]
        self.strategy = SimpleNamespace(
            _lightning_optimizers=[OptimizerStandIn(optimizer) for optimizer in optimizers],
            backward=lambda loss, _optimizer, *args, **kwargs: backward(loss, *args, **kwargs),
            all_gather=lambda tensor, *_args, **_kwargs: tensor,
        )
        self.precision_plugin = SimpleNamespace(clip_gradients=_clip_gradients)
        self.current_epoch = self.global_step = self.global_rank = self.local_rank = self.node_rank = 0
        self.world_size = self.num_devices = self.num_nodes = 1
        self.max_epochs = self.max_steps = self.estimated_stepping_batches = self.num_training_batches = 1
        self.is_global_zero = self.is_last_batch = True
        self.sanity_checking = self.fast_dev_run = False
        self.training, self.validating = stage == "train", stage == "val"
        self.testing, self.predicting = stage == "test", stage == "predict"
        self.gradient_clip_val = self.gradient_clip_algorithm = self.progress_bar_callback = None
        self.logger = self.datamodule = None
        self.loggers: list[Any] = []
        self.callbacks: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics = self.progress_bar_metrics = self.callback_metrics
        # As Lightning's results, these keep what was logged last, detached.
        self._logged: dict[str, Any] = {}

    def log(self, name: str, value: Any, *_args: Any, **_kwargs: Any) -> None:
        """Keep what a LightningModule logs, as a Trainer does."""
        self._logged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def log_dict(self, values: Mapping[str, Any], *_args: Any, **_kwargs: Any) -> None:
        """Keep all of them."""
        for name, value in values.items():
            self.log(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The step asked its Trainer for {name!r}, which the stand-in for the Trainer in estimate_memory does not "
            "have. Pass step=lambda model, batch: loss to estimate a step without it."
        )


class OptimizerStandIn:
    """An optimizer as ``self.optimizers()`` gives it: everything passes through, and its step can be counted."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def toggle_model(self, *_args: Any, **_kwargs: Any) -> Any:
        """Lightning's context for accumulating; here nothing has to be kept from other ranks."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def attach(module: nn.Module, trainer: TrainerStandIn) -> None:
    """Give a LightningModule and those in it the stand-in. Its attributes must be noted, to be put back afterwards."""
    for part in module.modules():
        if is_lightning_module(part):
            # Past the property of this name, which wants a true Trainer.
            vars(part)["_trainer"] = trainer
            vars(part)["log"] = trainer.log
            vars(part)["log_dict"] = trainer.log_dict
            vars(part)["print"] = _print_nothing


def is_lightning_module(model: object) -> bool:
    """Whether a module has the steps of a LightningModule. Lightning itself is not imported here."""
    return (
        isinstance(model, nn.Module)
        and hasattr(type(model), "training_step")
        and hasattr(type(model), "configure_optimizers")
    )


def has_step(module: nn.Module, name: str) -> bool:
    """Whether a LightningModule's step is its own: those that it inherits do nothing, but for predict_step."""
    step = getattr(module, name, None)
    inherited = getattr(step, "__module__", None) in {"lightning.pytorch.core.module", "pytorch_lightning.core.module"}
    return step is not None and (name == "predict_step" or not inherited)


def configured_optimizers(module: Any) -> tuple[list[Optimizer], list[Any]]:  # noqa: C901, one branch per form
    """The optimizers and schedulers that a LightningModule configures, in any of the forms that Lightning accepts.

    Raises:
        TypeError: It returned something else.
    """
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []

    def read(thing: Any) -> None:
        if isinstance(thing, Optimizer):
            optimizers.append(thing)
        elif isinstance(thing, Mapping) and "optimizer" in thing:
            read(thing["optimizer"])
            if "lr_scheduler" in thing:
                read_scheduler(thing["lr_scheduler"])
        elif isinstance(thing, (list, tuple)):
            if len(thing) == 2 and all(isinstance(part, (list, tuple)) for part in thing):  # noqa: PLR2004, optimizers and schedulers
                read(thing[0])
                for scheduler in thing[1]:
                    read_scheduler(scheduler)
            else:
                for part in thing:
                    read(part)
        elif thing is not None:
            raise TypeError(
                f"configure_optimizers of {type(module).__name__} returned a {type(thing).__name__} that is no "
                "optimizer. Return an optimizer, a list of them, a dict with the key 'optimizer', or (optimizers, "
                "schedulers)."
            )

    def read_scheduler(thing: Any) -> None:
        schedulers.append(thing["scheduler"] if isinstance(thing, Mapping) else thing)

    read(module.configure_optimizers())
    return optimizers, schedulers


def _print_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for LightningModule.print."""


def _clip_gradients(optimizer: Optimizer, clip_val: float, algorithm: Any = "norm") -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if str(getattr(algorithm, "value", algorithm)) == "value":
        torch.nn.utils.clip_grad_value_(parameters, clip_val)
    elif clip_val:
        torch.nn.utils.clip_grad_norm_(parameters, clip_val)
