"""OOMRecovery: goes on with training when a batch does not fit, by running it in parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import EitherCallback, callbacks_of, replace_closures, training_step
from lightning_memtools.callbacks.oom_report import OOMReport
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.recovery.gradient_exchange import why_unsent
from lightning_memtools.recovery.step_recovery import MANUAL_OPTIMIZATION, Recoveries, StepRecovery
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.loggers import log_scalars
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.ranks import RankPosts
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.warning_categories import FindingWarning


class OOMRecovery(EitherCallback, Neighbour):
    """Lets training go on after running out of memory: a batch that does not fit runs again in 2, 4, ... parts.

    The failed attempt is undone first. The gradients of the parts add up to those of the whole batch, up to rounding.
    For this, `loss` and `loss_weight` must be right: means are weighted by the size of each part, and sums are just
    added.

    The optimizer, schedulers and `global_step` see one step, with the loss of the whole batch. Whatever else
    training_step returns comes from the last part, and so do the values that it logs per step. Means over an epoch
    weight each part by its size. on_before_backward and on_after_backward run for each part. Later batches that are
    as large as one that failed are split at once. In manual optimization and in evaluation, batches are not split.

    A batch can be split if it consists of dictionaries, lists and tuples of two kinds of things: tensors and arrays
    whose dimension 0 counts samples, and lists with one string or number per sample. Other batches need `split_batch`.

    Before each step, random states are recorded and the model's buffers and metrics are copied, so that a failed step
    can be undone. Other attributes that training_step changes, such as a counter, are not restored.

    | logged | meaning |
    | --- | --- |
    | `memory/oom_recoveries` | the number of steps that were run again so far |
    | `memory/micro_batches` | the number of parts in the latest step that was run again |

    Args:
        loss: Whether the loss is the "mean" or "sum" over samples. No default, as a wrong value gives wrong gradients.
        loss_weight: For a loss that is a mean over something other than samples, such as tokens: a function that
            returns how many of them a batch has. A part for which it returns 0 is skipped.
        max_splits: The maximum number of micro-batches per batch.
        split_batch: A function `(batch, n_parts) -> parts`, for batches of any other form. If dimension 0 of any tensor
            does not count samples, `loss_weight` has to return the number of samples.
        allow_batch_norm: Split batches even if the model has BatchNorm layers in training mode, which then normalize
            each part by itself. If False, batches of such a model are not split.

    Raises:
        ValueError: An argument has a value that is not accepted; or, when fit begins, the strategy is not supported.
    """

    takes_part_in_trials = False

    # What is replaced stays with the original: it is undone once.
    parts_of_a_run = ("_undo", "_posts")

    def __init__(
        self,
        *,
        loss: Literal["mean", "sum"] | None = None,
        loss_weight: Callable[[Any], float] | None = None,
        max_splits: int = 8,
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        allow_batch_norm: bool = False,
    ) -> None:
        if not is_count(max_splits, least=2):  # a whole batch is one part
            raise ValueError(f"max_splits must be a whole number, at least 2, got {max_splits!r}.")
        if loss is None and loss_weight is None:
            raise ValueError(
                'Pass loss="mean" or loss="sum", which says what the loss of training_step is over the samples of its '
                "batch, or loss_weight=, a function that counts in a batch what else it is a mean over, such as tokens."
            )
        if loss not in {"mean", "sum", None}:
            raise ValueError(f"loss must be 'mean' or 'sum', got {loss!r}.")
        if loss_weight is not None and loss == "sum":
            raise ValueError('loss_weight has no effect on loss="sum". Leave it out, or give loss="mean".')
        for name, function in (("loss_weight", loss_weight), ("split_batch", split_batch)):
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be a function, got {function!r}.")
        self.loss: Literal["mean", "sum"] = loss or "mean"
        self.loss_weight = loss_weight
        self.max_splits = max_splits
        self.split_batch = split_batch
        self.allow_batch_norm = allow_batch_norm
        self._undo: Callable[[], None] | None = None
        self._posts: RankPosts | None = None
        self._told = (0, 0)  # the batches recovered on this rank, and on the others
        self.recoveries = Recoveries()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ValueError under strategies in which the other ranks would wait forever for a rank that fails."""
        self._stop()
        reason = why_unsupported("OOMRecovery", type(trainer.strategy))
        if reason is not None:
            raise ValueError(f"OOMRecovery does not work under {type(trainer.strategy).__name__}: {reason}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the training loop's step with one that recovers from running out of memory."""

        def tell(reason: str) -> None:
            if trainer.is_global_zero:
                print_on_console(f"OOMRecovery: batches that do not fit will not be run in parts: {reason}.")

        if not pl_module.automatic_optimization:
            tell(MANUAL_OPTIMIZATION)
            return
        if reason := why_unsent(trainer.strategy):
            raise ValueError(f"OOMRecovery does not work here under several ranks. {reason}.")
        recovery = StepRecovery(
            pl_module,
            trainer.strategy.root_device,
            max_splits=self.max_splits,
            split=self.split_batch,
            loss=self.loss,
            loss_weight=self.loss_weight,
            allow_batch_norm=self.allow_batch_norm,
            strategy=trainer.strategy,
            tell=tell,
        )
        self.recoveries, self._told, self._posts = recovery.recoveries, (0, 0), RankPosts(type(self).__name__)
        self._undo = replace_closures(trainer, recovery.run)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log whether this batch was recovered after running out of memory."""
        self._tell(trainer, elsewhere=self._told[1])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the number of recoveries on this rank, plus those that other ranks have reported by now."""
        self._tell(trainer, elsewhere=sum(n for *_, n in self._others()))

    on_train_end = on_validation_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the training loop's original step."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the training loop's original step."""
        self._stop()

    @property
    def memory_remark(self) -> str:
        """Return a line for MemoryMonitor's summary: the recoveries of this rank, and those reported by others."""
        others = (f"Rank {rank}: {text}" for rank, text, _ in self._others() if text)
        return " ".join(filter(None, [str(self.recoveries), *others]))

    def _tell(self, trainer: Trainer, elsewhere: int) -> None:
        """Log new recoveries, tell other ranks, and warn once. `elsewhere`: the number of recoveries on other ranks."""
        mine, before = self.recoveries, self._told
        self._told = (mine.n_recovered, elsewhere)
        if self._told == before or self._posts is None:
            return
        self._posts.post({"told": [str(mine), mine.n_recovered]})
        if mine.n_recovered and not before[0]:
            warnings.warn(f"OOMRecovery: {mine.latest}", FindingWarning, stacklevel=2)
            for callback in callbacks_of(trainer):
                if isinstance(callback, OOMReport) and not before[1]:
                    callback.report_recovered(trainer, mine.latest)
        scalars = {"memory/oom_recoveries": mine.n_recovered + elsewhere, "memory/micro_batches": mine.n_parts}
        log_scalars(trainer, scalars, training_step(trainer))

    def _others(self) -> list[tuple[int, str, int]]:
        """Return (rank, summary line, number of recoveries) for each other rank that has reported recoveries so far."""
        if self._posts is None:
            return []
        mine, posted = self._posts.rank, enumerate(self._posts.read())
        return [(rank, *post.values["told"]) for rank, post in posted if post.values and rank != mine]

    def _stop(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = None
