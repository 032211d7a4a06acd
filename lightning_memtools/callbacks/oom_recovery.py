"""OOMRecovery: goes on with training when a batch does not fit, by running it in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import (
    EitherCallback,
    LoggedValues,
    StepClosure,
    replace_closures,
    replace_step,
    replace_update,
)
from lightning_memtools.callbacks.oom_recovery_run import ToldRecoveries
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.recovery.gradient_exchange import GradientExchange, why_unsent
from lightning_memtools.recovery.step_recovery import MANUAL_OPTIMIZATION, Recoveries, StepRecovery
from lightning_memtools.recovery.step_start import BatchStep
from lightning_memtools.recovery.update_recovery import UpdateRecovery
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.strategies import why_unsupported

_EVALUATION_STEPS = ("validation_step", "test_step", "predict_step")


class OOMRecovery(EitherCallback, Neighbour):
    """Survives running out of memory: a batch that does not fit is run again as 2, 4, ... micro-batches.

    The failed attempt is taken back first. The gradients of the micro-batches add up to those of the whole batch, up to
    rounding: losses that are means over the samples are weighted with the sizes of the parts, and sums are added. A
    trial finds out which of the two the loss is: the gradients of a few samples together are compared with those of the
    same samples in two groups. A loss that is neither is refused. The trial is made for each batch that runs out of
    memory.

    The optimizer, schedulers, `global_step` and the logged values see one step. on_before_backward and
    on_after_backward run for each micro-batch, as with accumulated gradients. Batches as large as one that failed are
    then split from the beginning, and fewer parts are tried after a while. Batches of evaluation are split too, and
    their outputs are joined. In manual optimization, training batches are left alone.

    Before each step the states of random streams are noted, and buffers and metrics of the model are copied, so that a
    failed step can be taken back. Attributes that training_step itself changes, such as a counter, are not restored.

    | logged | meaning |
    | --- | --- |
    | `memory/oom_recoveries` | steps that were run again so far |
    | `memory/micro_batches` | the parts of the latest of them |
    | `memory/oom_skipped_batches` | batches that were skipped so far |

    Args:
        max_splits: The largest number of micro-batches of a batch.
        skip_batch: Skip a training batch that does not fit in the smallest parts, as if training_step returned None.
        split_batch: A function `(batch, n_parts) -> parts` for batches of a kind of your own, in place of a method
            `split_batch` that the module may have. It may return pairs `(part, number of samples)`, and has to where
            the tensors of a part are not all as long as it has samples, unless `loss_weight` is given.
        loss: "mean" or "sum" over the samples of the batch; "auto" finds out.
        loss_weight: A function of a batch that returns over how many of its parts, such as tokens, its loss is a mean.
            Without it, its samples are counted. A part for which it returns 0 is left out.
        allow_batch_norm: Split training batches even though BatchNorm then normalizes each part with its own
            statistics. Without this, such a model's training batches are not split.
        on_recover: "warn" warns of the first recovery of each kind; "ignore" does not.

    Raises:
        ValueError: An argument has a value that is not accepted; or, at setup, the strategy is not supported.
        TypeError: `max_splits` is not a whole number.
    """

    takes_part_in_trials = False

    # What is replaced stays with the original: it is undone once.
    parts_of_a_run = ("_undo", "_recovery", "_told")

    def __init__(
        self,
        *,
        max_splits: int = 8,
        skip_batch: bool = False,
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        loss: Literal["auto", "mean", "sum"] = "auto",
        loss_weight: Callable[[Any], float] | None = None,
        allow_batch_norm: bool = False,
        on_recover: Literal["warn", "ignore"] = "warn",
    ) -> None:
        if not is_count(max_splits, least=2):  # a whole batch is one part
            kind = ValueError if isinstance(max_splits, int) else TypeError
            raise kind(f"max_splits must be a whole number, at least 2, got {max_splits!r}.")
        if loss not in {"auto", "mean", "sum"}:
            raise ValueError(f"loss must be 'auto', 'mean' or 'sum', got {loss!r}.")
        if loss_weight is not None and loss == "sum":
            raise ValueError('loss_weight has no effect on loss="sum". Leave it out, or give loss="mean".')
        if on_recover not in {"warn", "ignore"}:
            raise ValueError(f"on_recover must be 'warn' or 'ignore', got {on_recover!r}.")
        self.max_splits = max_splits
        self.skip_batch = skip_batch
        self.split_batch = split_batch
        self.loss = loss
        self.loss_weight = loss_weight
        self.allow_batch_norm = allow_batch_norm
        self.on_recover = on_recover
        self._undo: list[Callable[[], None]] | None = None
        self._recovery: StepRecovery | None = None
        self._told: ToldRecoveries | None = None
        self.recoveries = Recoveries()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies under which a rank that fails would leave the others waiting."""
        self._stop()
        reason = why_unsupported("OOMRecovery", type(trainer.strategy))
        if reason is not None:
            raise ValueError(f"OOMRecovery does not work under {type(trainer.strategy).__name__}: {reason}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the steps."""
        undo = self._begin(trainer, pl_module)
        if pl_module.automatic_optimization:
            reason = why_unsent(trainer.strategy)
            if self.skip_batch and trainer.accumulate_grad_batches > 1 and trainer.world_size > 1:
                reason = reason or "skip_batch=True with accumulate_grad_batches: other ranks have added up gradients"
            if reason:
                raise ValueError(f"OOMRecovery does not work here under several ranks. {reason}.")
            undo.append(replace_closures(trainer, partial(self._run_training, trainer)))
        else:
            _say(trainer, MANUAL_OPTIMIZATION)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the optimizers' updates."""
        assert self._undo is not None
        assert self._told is not None
        self._told.updates = updates = UpdateRecovery(trainer.strategy.root_device, n_ranks=trainer.world_size)
        self._undo += [replace_update(each, partial(updates.run, each)) for each in trainer.optimizers]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the steps, unless that was done when fit began."""
        if self._recovery is None:
            self._begin(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what happened in this batch."""
        if self._told is not None:
            self._told.tell(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what happened here and, as far as known by now, on other ranks."""
        if self._told is not None:
            self._told.tell(trainer, of_all=True)

    on_train_end = on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the replaced steps."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the replaced steps."""
        self._stop()

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> list[Callable[[], None]]:
        agrees = self.skip_batch and trainer.world_size > 1
        self._recovery = StepRecovery(
            pl_module,
            trainer.strategy.root_device,
            max_splits=self.max_splits,
            skip_batch=self.skip_batch,
            split=self.split_batch or getattr(pl_module, "split_batch", None),
            loss=self.loss,
            loss_weight=self.loss_weight,
            allow_batch_norm=self.allow_batch_norm,
            exchange=GradientExchange(trainer.strategy, agrees=agrees),
            tell=partial(_say, trainer),
        )
        self.recoveries = self._recovery.recoveries
        self._told = ToldRecoveries(type(self).__name__, self.recoveries, warns=self.on_recover == "warn")
        run = partial(self._run_evaluation, trainer)
        self._undo = [replace_step(pl_module, name, run) for name in _EVALUATION_STEPS]
        return self._undo

    def _run_training(self, trainer: Trainer, step: StepClosure) -> Any:
        assert self._recovery is not None
        return self._recovery.run(
            BatchStep(step.batch, step.forward, LoggedValues(trainer), step.backward, step.zero_grad, step.skipped)
        )

    def _run_evaluation(self, trainer: Trainer, own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        assert self._recovery is not None
        if trainer.training or not given:  # training_step calls it, which is run in parts itself
            return own(*given, **named)
        batch, *rest = given
        return self._recovery.run(BatchStep(batch, lambda part: own(part, *rest, **named), LoggedValues(trainer)))

    @property
    def memory_remark(self) -> str:
        """A line on the latest call of the Trainer for the summary of MemoryMonitor; "" where nothing happened."""
        return "" if self._told is None else self._told.remark

    def _stop(self) -> None:
        for undo in reversed(self._undo or []):
            undo()
        self._undo = self._recovery = None


def _say(trainer: Trainer, reason: str) -> None:
    if trainer.is_global_zero:
        print_on_console(f"OOMRecovery: training batches that do not fit will not be run in parts: {reason}.")
