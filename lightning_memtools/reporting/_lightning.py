"""Every use of Lightning's private attributes, each with the reason why no public way serves."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor


def training_step(trainer: Trainer) -> int:
    """The x axis of `self.log`: how many training steps were finished before the present one.

    `trainer.global_step` counts optimizer steps: one too many in on_train_batch_end, and n a batch with n optimizers.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001, see above


def is_accumulating(trainer: Trainer) -> bool:
    """Whether the present micro-batch is not the last of its step (never in manual optimization).

    The public counters do not know of a last, incomplete accumulation or of iterable loaders; the loop does.
    """
    if trainer.lightning_module is not None and not trainer.lightning_module.automatic_optimization:
        return False
    return trainer.fit_loop._should_accumulate()  # noqa: SLF001, see above


def values_logged_in_step(trainer: Trainer) -> dict[str, Tensor]:
    """What training_step gave to `self.log(..., on_step=True)` for the present batch: name to device scalar.

    `trainer.callback_metrics` computes every epoch metric at each access, and is only filled after callbacks ran.
    """
    results: Any = trainer.fit_loop._results  # noqa: SLF001, see above
    found: dict[str, Tensor] = {}
    for key, metric in results.items():
        value = metric._forward_cache  # noqa: SLF001, the value of this very step
        if (
            key.startswith("training_step.")
            and metric.meta.on_step
            and isinstance(value, Tensor)
            and value.numel() == 1
        ):
            found[metric.meta.name] = value
    return found


def values_logged_in_evaluation(trainer: Trainer) -> dict[str, Tensor]:
    """What the evaluation run that is ending gave to `self.log`: name to its value over the whole run.

    `trainer.callback_metrics` also holds what training logged; only the results know which hook a value came from.
    With several data loaders a name ends with "/dataloader_idx_<i>", as Lightning writes it.
    """
    results: Any = trainer._results  # noqa: SLF001, see above
    found: dict[str, Tensor] = {}
    for metric in (results or {}).values():
        index = metric.meta.dataloader_idx
        suffix = "" if index is None else f"/dataloader_idx_{index}"
        for name in (metric.meta.forked_name(on_step=False), metric.meta.name):
            value = trainer.callback_metrics.get(name + suffix)
            if isinstance(value, Tensor) and value.numel() == 1 and metric.meta.on_epoch:
                found[metric.meta.name + suffix] = value
                break
    return found
