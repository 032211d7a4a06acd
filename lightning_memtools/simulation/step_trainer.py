"""A Lightning Trainer whose loops are run batch by batch, without a call of `fit` or `validate`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_memtools._lightning import Callback, Trainer, part_of_lightning
from lightning_memtools._torch import FAKE_TENSOR_LOGGER

# What the Trainer is told of an epoch's length: schedules over it and warm-ups work as in a long training.
_BATCHES_OF_EPOCH = 1000


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: silence Lightning's messages, and warnings that the user sees in real training anyway.

    Torch's logger for fake tensors is silenced too. It would log a traceback of its own when shapes do not match.
    """
    names = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", FAKE_TENSOR_LOGGER)
    loggers = [logging.getLogger(name) for name in names]
    levels = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


def precision_plugin(name: str, device: str) -> Any:
    """Return Lightning's plugin for the precision `name`, such as "16-mixed", on the device type `device`."""
    plugins = part_of_lightning("plugins")
    if name == "32-true":
        return plugins.Precision()
    if name.endswith("-true"):
        return plugins.DoublePrecision() if name == "64-true" else plugins.HalfPrecision(name)
    return plugins.MixedPrecision(name, device, torch.amp.GradScaler(device) if name == "16-mixed" else None)


class EndlessLoader:
    """A loader that takes its batches from an endless iterator, and reports `length` as its length."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.length, self.dataset = batches, _BATCHES_OF_EPOCH, self  # hooks ask for a dataset

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __len__(self) -> int:
        return self.length


class PhaseHooks(Callback):
    """Callback that passes the name of each phase, such as "backward", to a function when that phase begins."""

    def __init__(self, begin: Callable[[str], None]) -> None:
        self._begin = begin

    def on_before_backward(self, *_: Any) -> None:
        """Report that the backward phase begins."""
        self._begin("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """In manual optimization, report that "forward" begins again, because training_step goes on after backward."""
        del trainer
        if not pl_module.automatic_optimization:
            self._begin("forward")

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        """Report that the phase "clip" begins, if gradients are clipped."""
        if trainer.gradient_clip_val:
            self._begin("clip")


# The attributes of a Trainer that its loop works with.
_OF_LOOP = frozenset({
    "accelerator", "accumulate_grad_batches", "callbacks", "evaluating", "facts", "fit_loop", "lightning_module",
    "logger", "loggers", "lr_scheduler_configs", "model", "optimizers", "original", "precision_plugin", "predict_loop",
    "predicting", "profiler", "received_sigterm", "sanity_checking", "state", "strategy", "test_loop", "testing",
    "training", "validate_loop", "validating",
})  # fmt: skip


class StepTrainer(Trainer):
    """A Trainer that logs and saves nothing. Attributes that it lacks are read from another Trainer, `original`.

    Args:
        original: The Trainer of the run that a step is taken from.
        device: The device, such as "cuda:0".
        precision: The precision plugin.
        accumulate: The number of batches per optimizer step.
        clip: The norm to which gradients are clipped; None for no clipping.

    Attributes:
        facts: In a replay of a saved step, the values of this Trainer's attributes, by name. Other attributes are
            read from `original`, except those that Lightning's loop itself uses.
    """

    callbacks: list[Any]
    facts: Mapping[str, Any] | None = None
    original: Any = None

    def __init__(self, original: Any, device: str, precision: Any, *, accumulate: int, clip: float | None) -> None:
        strategies, environments = part_of_lightning("strategies"), part_of_lightning("plugins.environments")
        place = torch.device(device)
        super().__init__(
            accelerator=place.type,
            devices=1,
            strategy=strategies.SingleDeviceStrategy(place),
            plugins=[precision, environments.LightningEnvironment()],
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
            gradient_clip_algorithm=None if original is None else original.gradient_clip_algorithm,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            inference_mode=False,  # a dispatch mode does not see all operators in it
        )
        self.loggers = [part_of_lightning("loggers.logger").DummyLogger()]
        if original is not None:
            self.original, self.datamodule = original, original.datamodule

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        facts = None if name.startswith("_") or name in _OF_LOOP else own("facts")
        if facts is None:
            return own(name)
        if name in facts:
            return facts[name]
        return own(name) if self.original is None else getattr(self.original, name)

    def __getattr__(self, name: str) -> Any:
        if self.original is None or name.startswith("__"):
            raise AttributeError(f"'Trainer' object has no attribute {name!r}")
        return getattr(self.original, name)
