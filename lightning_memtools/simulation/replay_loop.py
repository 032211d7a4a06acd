"""Runs the batches of one training step again, in Lightning's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._lightning import Callback, accumulate_while
from lightning_memtools.simulation.step_runner import Recipe, StepListener, StepRunner
from lightning_memtools.simulation.step_trainer import precision_plugin


class _StepEndsError(BaseException):
    """Raised just before an optimizer's update to end the training step. `except Exception` does not catch it."""


class _NoUpdateError(BaseException):
    """Raised just before an optimizer's update to skip the update, while the training step continues."""


class ReplayLoop(StepListener):
    """Reruns the batches of one training step in Lightning's loop, and stops before the optimizer's update.

    Nothing is logged. The hooks for batch transfer do not run, because the batches are already on the device. The
    step sees a Trainer whose counters and settings come from `facts`. The metrics, data loaders and data module are
    those of `original`. It has none of its callbacks.

    Args:
        module: The LightningModule. Its attributes are changed; the caller has to restore them.
        original: The Trainer of the run that the step comes from; None if the step was read from a file.
        facts: The values that the Trainer's attributes have during the replay, by attribute name.
        optimizers: The optimizers.
        schedulers: Lightning's configurations of the learning rate schedulers.
        accumulate: The number that losses are divided by.
        scale: The factor by which the gradient scaler multiplies losses; None for no gradient scaler.
        forward: Returns a context manager, within which training_step runs.
        on_loss: Called with each loss before its backward pass, after the scaler has multiplied it.
        before_update: Called in place of each optimizer update; returns True to end the step there.
    """

    def __init__(
        self,
        module: Any,
        *,
        original: Any,
        facts: Mapping[str, Any],
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        accumulate: int,
        scale: float | None,
        forward: Callable[[], Any],
        on_loss: Callable[[Tensor], None],
        before_update: Callable[[], bool],
    ) -> None:
        self._scale, self._batch = scale, None
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self._plugin = precision_plugin("32-true" if scale is None else "16-mixed", device.type)
        if scale is not None:
            self._plugin.scaler = torch.amp.GradScaler(device.type, init_scale=scale)
        self._plugin.forward_context, self._plugin.convert_input = forward, _same_batch
        vars(module)["on_before_batch_transfer"] = _same_batch
        self._runner = StepRunner(
            module,
            Recipe(precision=self._plugin, accumulate=accumulate),
            self,
            device=str(device),
            make_optimizer=lambda _parameters: list(optimizers) or None,
            trainer=original,
            callbacks=[_ReplayHooks(on_loss, before_update)],
            replay=facts,
        )
        trainer, strategy = self._runner.trainer, self._runner.trainer.strategy
        if original is None:
            self._runner.set_schedulers(schedulers)
        else:
            trainer.loggers = trainer.loggers if original.loggers else []
        update = strategy.optimizer_step
        strategy.optimizer_step = lambda *args, **options: self._without_update(update, *args, **options)

    def run(self, batch: Any, index: int, *, is_last: bool) -> bool:
        """Run a batch; return True if `before_update` ended the step in this batch.

        Args:
            batch: The batch.
            index: Its index in the epoch.
            is_last: Whether it is the last batch of the step.
        """
        self._batch = batch
        accumulate_while(self._runner.trainer, not is_last)
        try:
            self._runner.advance(index)
        except _StepEndsError:
            return True
        except StopIteration:  # a hook said that the rest of the epoch is to be left out
            return False
        return False

    def next_batch(self) -> Any:
        """Return the batch that is being run."""
        return self._batch

    def place(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Return the batch unchanged, without calling `move`, since it is already on the device."""
        del move
        return batch

    def _without_update(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return step(*args, **options)
        except _NoUpdateError:
            if self._scale is not None:
                self._plugin.scaler.update(self._scale)  # it refuses to unscale twice
            return None


class _ReplayHooks(Callback):
    """Callback that reports each loss, and raises just before an optimizer's update to skip it or to end the step."""

    def __init__(self, on_loss: Callable[[Tensor], None], before_update: Callable[[], bool]) -> None:
        self._on_loss, self._before_update = on_loss, before_update

    def on_before_backward(self, _trainer: Any, _module: Any, loss: Tensor) -> None:
        self._on_loss(loss)

    def on_before_optimizer_step(self, *_: Any) -> None:
        raise (_StepEndsError if self._before_update() else _NoUpdateError)


def _same_batch(batch: Any, *_args: Any, **_options: Any) -> Any:
    """Return the batch unchanged, because the hooks that prepare a batch have already run on it."""
    return batch
