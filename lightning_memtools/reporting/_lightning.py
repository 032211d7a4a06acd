"""Every use of Lightning's private attributes, each with the reason why no public way serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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


@dataclass(frozen=True, slots=True)
class LoopMark:
    """Where the training loop stood, to turn it back: counters and schedulers. See `mark_loops`."""

    counters: list[tuple[object, dict[str, Any]]]
    schedulers: list[tuple[Any, dict[str, Any]]]
    batches_that_stepped: int


def mark_loops(trainer: Trainer) -> LoopMark:
    """Note every counter that a training step moves, and the state of every scheduler.

    `trainer.global_step` is read-only, and checkpoints are written from these counters.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    progresses: list[Any] = [
        trainer.fit_loop.epoch_progress,
        epoch_loop.batch_progress,
        epoch_loop.scheduler_progress,
        epoch_loop.automatic_optimization.optim_progress.optimizer.step,
        epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad,
        epoch_loop.manual_optimization.optim_step_progress,
    ]
    trackers: list[object] = [tracker for each in progresses for tracker in (each.total, each.current)]
    counters = [(tracker, dict(vars(tracker))) for tracker in trackers]
    for tracker, values in counters:
        if tracker is epoch_loop.batch_progress.total or tracker is epoch_loop.batch_progress.current:
            # As if the present batch had not begun: a run that resumes from here would count one step too many else.
            values.update(dict.fromkeys(values, values["completed"]))
    counters.append((epoch_loop.batch_progress, {"is_last_batch": epoch_loop.batch_progress.is_last_batch}))
    return LoopMark(
        counters,
        [(config.scheduler, config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        epoch_loop._batches_that_stepped,  # noqa: SLF001, see above
    )


def turn_back(trainer: Trainer, mark: LoopMark) -> None:
    """Put the counters and schedulers back to where they stood; the data loaders are not turned back."""
    for tracker, values in mark.counters:
        vars(tracker).update(values)
    for scheduler, state in mark.schedulers:
        scheduler.load_state_dict(state)
    trainer.fit_loop.epoch_loop._batches_that_stepped = mark.batches_that_stepped  # noqa: SLF001, see above


def guard_saving(trainer: Trainer, check: Callable[[], None]) -> Callable[[], None]:
    """Call `check` before each checkpoint, and return what undoes this.

    The hook on_save_checkpoint is not called for checkpoints of weights alone. If `check` raises, nothing is saved.
    """
    save = trainer.save_checkpoint
    is_active = True

    def guarded(*args: Any, **kwargs: Any) -> None:
        if is_active:
            check()
        save(*args, **kwargs)

    def undo() -> None:
        nonlocal is_active
        is_active = False
        # Someone else may have wrapped it since: then ours stays inside theirs and lets everything through.
        if vars(trainer).get("save_checkpoint") is guarded:
            if getattr(save, "__self__", None) is trainer:
                del vars(trainer)["save_checkpoint"]
            else:
                trainer.save_checkpoint = save  # type: ignore[method-assign]

    trainer.save_checkpoint = guarded  # type: ignore[method-assign]
    return undo


def write_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write a full checkpoint; call it on every rank.

    `trainer.save_checkpoint` ends with a barrier, in which the other ranks would wait for ever if rank 0 cannot write.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)  # noqa: SLF001, see above
    trainer.strategy.save_checkpoint(checkpoint, path)


def _callbacks(trainer: Trainer) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
    return callbacks


def saves_on_exception(trainer: Trainer) -> bool:
    """Whether a ModelCheckpoint will save when training fails."""
    return any(getattr(callback, "save_on_exception", False) for callback in _callbacks(trainer))


def forbid_saving_on_exception(trainer: Trainer) -> None:
    """Make ModelCheckpoint(save_on_exception=True) believe that this step is saved already: its weights are bad."""
    for callback in _callbacks(trainer):
        if getattr(callback, "save_on_exception", False) and hasattr(callback, "_last_global_step_saved"):
            callback._last_global_step_saved = trainer.global_step  # noqa: SLF001, it offers no way to be called off


def gradient_scaler(trainer: Trainer) -> Any:
    """The GradScaler of 16-mixed training, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)
