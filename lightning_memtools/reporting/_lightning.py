"""Every use of Lightning's private attributes, each with the reason why no public way serves."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
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


def loop_of(trainer: Trainer, stage: Literal["train", "val", "test", "predict"]) -> Any:
    """The loop that runs a stage in the present call of the Trainer; validation within fit has one of its own.

    Public are only `fit_loop`, `validate_loop`, `test_loop` and `predict_loop`, and `epoch_loop.val_loop` below them.
    """
    if stage == "val" and trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    return {"train": trainer.fit_loop, "val": trainer.validate_loop, "test": trainer.test_loop,
            "predict": trainer.predict_loop}[stage]  # fmt: skip


def source_of(loop: Any) -> Any:
    """Where a loop asks for its data loaders. No public way tells whether these were passed or come from a hook."""
    return loop._data_source  # noqa: SLF001, see above


def set_source(loop: Any, source: Any) -> None:
    """Have a loop ask somebody else for its data loaders; the hooks cannot be replaced on a user's module or class."""
    loop._data_source = source  # noqa: SLF001, see above


def forget_loaders(loop: Any) -> None:
    """Have a loop ask for its loaders anew at its next `setup_data`, and end the workers of the present ones.

    The public `reload_dataloaders_every_n_epochs` acts at epochs only, and not between two sizes.
    """
    fetcher = loop._data_fetcher  # noqa: SLF001, see above
    if fetcher is not None:
        fetcher.teardown()
        loop._data_fetcher = None  # noqa: SLF001, see above
    loop._combined_loader = None  # noqa: SLF001, see above


def prepared_loaders(loop: Any) -> list[Any]:
    """The loaders that a loop will read, with the samplers that the Trainer put in; [] before they are set up.

    `trainer.train_dataloader` gives the collection as the user nested it, and there is none for predict.
    """
    combined = loop._combined_loader  # noqa: SLF001, see above
    return [] if combined is None else list(combined.flattened)


def batches_in_evaluation(loop: Any) -> int:
    """How many batches an evaluation or prediction loop will run, over all its loaders, at the present limits."""
    limits: Any = loop.max_batches if isinstance(loop.max_batches, list) else [loop.max_batches]
    return int(min(sum(limits), 2**31))


def set_root_directory(trainer: Trainer, directory: str) -> None:
    """Where files go by default. `default_root_dir` can only be set in Trainer's constructor."""
    vars(trainer)["_default_root_dir"] = directory


def without_collectives(trainer: Trainer) -> None:
    """Take out the collectives that the loop itself runs in every batch, until the loop's attributes are put back.

    A rank that has run out of memory does not take part in them any more, and the others would wait for it.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]  # noqa: SLF001
    strategy: Any = trainer.strategy
    strategy.barrier = lambda *args, **kwargs: None  # noqa: ARG005, nobody is waited for
    strategy.broadcast = lambda obj, src=0: obj  # noqa: ARG005, as on one rank
    strategy.reduce_boolean_decision = lambda decision, all=True: decision  # noqa: A006, ARG005, Lightning's name


def correct_logged_hparam(owner: Any, name: str, value: int) -> None:
    """Let loggers see a value that was found after `save_hyperparameters`, which keeps a copy for them."""
    initial = getattr(owner, "_hparams_initial", None)
    if initial is not None and name in initial:
        initial[name] = value


def end_the_call() -> BaseException:
    """The error that makes a call of the Trainer end in good order before its loop has run, as its own tuners do.

    `trainer.should_stop` is reset when fit begins, and would still run the sanity check.
    """
    return _TunerExitException()
