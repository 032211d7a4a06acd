"""A stand-in for the Trainer, with which a bad step is run again, with its Trainer or from a file without one.

All other steps run in Lightning's own loop (`simulation/step_runner.py`). A replay stops within a manual training_step
where the bad update would follow, takes counters and a loss scale from a file, and leaves the run's own Trainer as it
is in the middle of its step: replays are exact in 123 of 128 failing models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class TrainerStandIn:
    """Takes the Trainer's place while a step of a LightningModule runs; an unknown attribute raises AttributeError.

    Args:
        backward: Runs backward of a loss, for ``self.manual_backward``.
        stage: The stage that the Trainer reports: train, val, test or predict.
        optimizers: The optimizers that ``self.optimizers()`` returns; see `use`.
        schedulers: The schedulers that ``self.lr_schedulers()`` returns.
        step: Called with an optimizer in place of its step; schedulers do not step either then. None lets both step.
        module: The module whose parameters ``optimizer.toggle_model()`` switches; with None it does nothing.
        facts: Attributes that replace the stand-in's own, such as ``{"global_step": 812}``.
        original: The Trainer itself, if there is one. Its counters, metrics, callbacks and everything else that the
            stand-in does not have are read from it.
        logger: The logger that ``self.logger`` returns.
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
        missing: str,
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
        shown = schedulers if self._step is None else [_StillScheduler(one) for one in schedulers]
        self.lr_scheduler_configs = [SimpleNamespace(scheduler=one) for one in shown]

    def optimizers_of_step(self, use_pl_optimizer: bool = True) -> Any:
        """Return the only optimizer, or a list of them, as ``self.optimizers()`` does."""
        found: list[Any] = [*(self._wrapped if use_pl_optimizer else self.optimizers)]
        return found[0] if len(found) == 1 else found

    def log(self, name: str, value: Any, *_args: Any, **_kwargs: Any) -> None:
        """Keep what a LightningModule logs, as a Trainer does."""
        self._logged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def log_dict(self, values: Mapping[str, Any], *_args: Any, **_kwargs: Any) -> None:
        """Keep all these values, as `log` does."""
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
    """Wraps an optimizer as ``self.optimizers()`` does; everything that is not defined here is the optimizer's own.

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
        """Require gradients only of this optimizer's parameters, as Lightning does."""
        if self._module is None:
            yield
            return
        self._module.toggle_optimizer(self)
        yield
        self._module.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class _StillScheduler:
    """Wraps a scheduler so that its step does nothing."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class SilentLogger:
    """Stands for a logger and for its experiment: accepts every call and keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Do nothing."""
        return self


def attach(module: nn.Module, trainer: TrainerStandIn) -> None:
    """Give the stand-in to a LightningModule and to those within it.

    This changes their attributes, which the caller has to save before and restore afterwards.
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
    """Return the first arguments, as many as a function takes by position, as Lightning does for hooks."""
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


def configured_optimizers(module: Any) -> tuple[list[Optimizer], list[Any]]:  # noqa: C901, one branch per form
    """Return the optimizers and schedulers that a LightningModule configures, in any form that Lightning accepts.

    Raises:
        TypeError: ``configure_optimizers`` returned none of these forms.
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
