"""A stand-in for the Trainer, with which a LightningModule's own step runs without one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

ESTIMATE_HAS_NO = (
    "which the stand-in for the Trainer in estimate_memory does not have. Pass step=lambda model, batch: loss to "
    "estimate a step without it."
)


class TrainerStandIn:
    """Answers what a LightningModule asks its Trainer while its step runs; an unknown attribute raises with its name.

    Args:
        backward: Runs backward of a loss, for ``self.manual_backward``.
        stage: The stage that the Trainer reports: train, val, test or predict.
        optimizers: What ``self.optimizers()`` returns; see `use`.
        schedulers: What ``self.lr_schedulers()`` returns.
        step: Called with an optimizer in place of its step. The schedulers do not move either then. None lets both
            step.
        module: The module, for ``optimizer.toggle_model()``; None makes that do nothing.
        facts: Attributes that replace the stand-in's own, such as ``{"global_step": 812}``.
        original: The Trainer itself, if there is one. It answers for its counters, metrics, callbacks and everything
            that the stand-in does not have.
        logger: What ``self.logger`` returns.
        missing: The end of the error message about an attribute that is missing.
    """

    def __init__(
        self,
        *,
        backward: Callable[..., None],
        stage: str = "train",
        optimizers: Sequence[Optimizer] = (),
        schedulers: Sequence[Any] = (),
        step: Callable[[Optimizer], None] | None = None,
        module: Any = None,
        facts: Mapping[str, Any] | None = None,
        original: Any = None,
        logger: Any = None,
        missing: str = ESTIMATE_HAS_NO,
    ) -> None:
        self._original = original
        self._missing = missing
        self._step = step
        self._module = module
        self.strategy = SimpleNamespace(
            backward=lambda loss, _optimizer, *args, **kwargs: backward(loss, *args, **kwargs),
            all_gather=lambda tensor, *_args, **_kwargs: tensor,
        )
        self.precision_plugin = SimpleNamespace(clip_gradients=_clip_gradients)
        self.training, self.validating = stage == "train", stage == "val"
        self.testing, self.predicting = stage == "test", stage == "predict"
        self.sanity_checking = False
        self.progress_bar_callback = None
        self.logger = logger
        self.loggers = [] if logger is None else [logger]
        if original is None:
            vars(self).update(_facts_of_one_process())
        vars(self).update(facts or {})
        # As Lightning's results, these keep what was logged last, detached.
        self._logged: dict[str, Any] = {}
        self.use(optimizers, schedulers)

    def use(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Set the optimizers and schedulers, which a LightningModule may configure after it has its Trainer."""
        self.optimizers = list(optimizers)
        self._wrapped = [OptimizerStandIn(one, self._step, self._module) for one in optimizers]
        shown = schedulers if self._step is None else [_StandingScheduler(one) for one in schedulers]
        self.lr_scheduler_configs = [SimpleNamespace(scheduler=one) for one in shown]

    def optimizers_of_step(self, use_pl_optimizer: bool = True) -> Any:
        """Return what ``self.optimizers()`` returns: the only optimizer, or a list of them."""
        found: list[Any] = [*(self._wrapped if use_pl_optimizer else self.optimizers)]
        return found[0] if len(found) == 1 else found

    def log(self, name: str, value: Any, *_args: Any, **_kwargs: Any) -> None:
        """Keep what a LightningModule logs, as a Trainer does."""
        self._logged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def log_dict(self, values: Mapping[str, Any], *_args: Any, **_kwargs: Any) -> None:
        """Keep all of them."""
        for name, value in values.items():
            self.log(name, value)

    def __getattr__(self, name: str) -> Any:
        original = vars(self).get("_original")
        if original is not None:
            return getattr(original, name)
        raise AttributeError(f"The step asked its Trainer for {name!r}, {vars(self).get('_missing', '')}")


def _facts_of_one_process() -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    return {
        **dict.fromkeys(("current_epoch", "global_step", "global_rank", "local_rank", "node_rank"), 0),
        **dict.fromkeys(("world_size", "num_devices", "num_nodes"), 1),
        **dict.fromkeys(("max_epochs", "max_steps", "estimated_stepping_batches", "num_training_batches"), 1),
        "is_global_zero": True,
        "is_last_batch": True,
        "fast_dev_run": False,
        "datamodule": None,
        "callbacks": [],
        "gradient_clip_val": None,
        "gradient_clip_algorithm": None,
        **dict.fromkeys(("callback_metrics", "logged_metrics", "progress_bar_metrics"), metrics),
    }


class OptimizerStandIn:
    """An optimizer as ``self.optimizers()`` returns it; whatever is not defined here is the optimizer's own.

    Args:
        optimizer: The optimizer.
        step: Called with the optimizer in place of its step; None lets it step.
        module: The LightningModule, for `toggle_model`.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[Optimizer], None] | None, module: Any) -> None:
        self.optimizer = optimizer
        self._instead = step
        self._module = module

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimizer, or run the closure alone where a step is replaced."""
        if self._instead is None:
            return self.optimizer.step(**kwargs) if closure is None else self.optimizer.step(closure, **kwargs)
        if closure is not None:
            closure()
        return self._instead(self.optimizer)

    @contextmanager
    def toggle_model(self, *_args: Any, **_kwargs: Any) -> Iterator[None]:
        """Give gradients to this optimizer's parameters alone, as Lightning does."""
        if self._module is None:
            yield
            return
        self._module.toggle_optimizer(self)
        yield
        self._module.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class _StandingScheduler:
    """A scheduler whose step does nothing."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class SilentLogger:
    """A logger, and anything that can be asked of one: accepts every call and keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Do nothing."""
        return self


def attach(module: nn.Module, trainer: TrainerStandIn) -> None:
    """Give the stand-in to a LightningModule and to those within it.

    This changes their attributes: the caller has to note these before, and to restore them afterwards.
    """
    part: Any
    for part in module.modules():
        if is_lightning_module(part):
            part.trainer = trainer
            vars(part)["log"] = trainer.log
            vars(part)["log_dict"] = trainer.log_dict
            vars(part)["print"] = _print_nothing
            # The module's own method looks for Lightning's wrappers of optimizers, in a private attribute.
            vars(part)["optimizers"] = trainer.optimizers_of_step


def accepted_arguments(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Return as many of the arguments as a function takes by position, as Lightning passes them to hooks."""
    try:
        kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    except ValueError:  # it is written in C and does not say
        return arguments
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return arguments
    by_position = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return arguments[: sum(kind in by_position for kind in kinds)]


def is_lightning_module(model: object) -> bool:
    """Return whether a module has the steps of a LightningModule. Lightning itself is not imported here."""
    return (
        isinstance(model, nn.Module)
        and hasattr(type(model), "training_step")
        and hasattr(type(model), "configure_optimizers")
    )


def has_step(module: nn.Module, name: str) -> bool:
    """Return whether a step is the LightningModule's own; those that it inherits do nothing, but for predict_step."""
    step = getattr(module, name, None)
    inherited = getattr(step, "__module__", None) in {"lightning.pytorch.core.module", "pytorch_lightning.core.module"}
    return step is not None and (name == "predict_step" or not inherited)


def configured_optimizers(module: Any) -> tuple[list[Optimizer], list[Any]]:  # noqa: C901, one branch per form
    """Return the optimizers and schedulers that a LightningModule configures, in any form that Lightning accepts.

    Raises:
        TypeError: ``configure_optimizers`` returned something else.
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
    """Do nothing, in place of LightningModule.print."""


def _clip_gradients(optimizer: Optimizer, clip_val: float, algorithm: Any = "norm") -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if str(getattr(algorithm, "value", algorithm)) == "value":
        torch.nn.utils.clip_grad_value_(parameters, clip_val)
    elif clip_val:
        torch.nn.utils.clip_grad_norm_(parameters, clip_val)
