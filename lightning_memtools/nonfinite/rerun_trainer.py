"""The Trainer of a step that is run once more: nothing is logged, no optimizer moves anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from lightning_memtools.simulation.trainer_stand_in import OptimizerStandIn, TrainerStandIn

_ASKED_OF_THE_ORIGINAL = ("callback_metrics", "logged_metrics", "progress_bar_metrics", "datamodule", "callbacks")


class Silent:
    """A logger, and whatever can be asked of one: takes everything, keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Take it."""
        return self


class RerunTrainer(TrainerStandIn):
    """What the step finds in place of its Trainer.

    Args:
        optimizers: The module's optimizers.
        schedulers: Its schedulers; they do not move.
        backward: Runs backward of a loss, for ``self.manual_backward``.
        step: Called in place of an optimizer's step, with the optimizer.
        facts: What the Trainer said of itself when the step ran.
        module: The module, for `toggle_model`.
        original: The Trainer itself, where it is still there: asked for everything else.
    """

    def __init__(
        self,
        *,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        backward: Callable[..., None],
        step: Callable[[Optimizer], None],
        facts: Mapping[str, Any],
        module: Module,
        original: Any = None,
    ) -> None:
        super().__init__(list(optimizers), [_StandingScheduler(each) for each in schedulers], backward, "train")
        # Where LightningModule.optimizers() looks.
        vars(self.strategy).update(
            _lightning_optimizers=[_StandingOptimizer(each, step, module) for each in optimizers]
        )
        vars(self).update(facts)
        silent = Silent()
        vars(self).update(logger=silent, loggers=[silent], original=original)
        for name in _ASKED_OF_THE_ORIGINAL if original is not None else ():
            del vars(self)[name]

    def __getattr__(self, name: str) -> Any:
        original = vars(self).get("original")
        if original is not None:
            return getattr(original, name)
        raise AttributeError(
            f"The step asked its Trainer for {name!r}, which a replay does not have. Run the step with a Trainer, or "
            "give replay() a model that does not ask for it."
        )


class _StandingOptimizer(OptimizerStandIn):
    """An optimizer whose step moves nothing."""

    def __init__(self, optimizer: Optimizer, step: Callable[[Optimizer], None], module: Any) -> None:
        super().__init__(optimizer)
        self._instead = step
        self._module = module

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # LightningModule.optimizers() unpacks a single one only if it is an Optimizer
        return type(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None, **_kwargs: Any) -> None:
        """Run the closure, as an optimizer does; and no more."""
        if closure is not None:
            closure()
        self._instead(self.optimizer)

    @contextmanager
    def toggle_model(self, *_args: Any, **_kwargs: Any) -> Iterator[None]:
        """As Lightning's: within it, only this optimizer's parameters get gradients."""
        self._module.toggle_optimizer(self)
        yield
        self._module.untoggle_optimizer(self)


class _StandingScheduler:
    """A scheduler that stands still: what the step did with it has been done already."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
