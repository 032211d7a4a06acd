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
    """Survives running out of memory: a batch that does not fit is run again as 2, 4, ... micro-batches.

    The failed attempt is undone first. The gradients of the micro-batches add up to those of the whole batch, up to
    rounding, if `loss` or `loss_weight` correctly says how the loss depends on the samples: means are weighted by the
    sizes of the parts, and sums are added.

    The optimizer, schedulers and `global_step` see one step, with the loss of the whole batch. Anything else that
    training_step returns, and the per-step values that it logs, come from the last part; means over an epoch weight
    each part by its size. on_before_backward and on_after_backward run for each part, as with accumulated gradients.
    From then on, batches as large as one that failed are split at once. In manual optimization and in evaluation,
    batches are not split.

    A batch can be split if it consists of tensors and arrays whose dimension 0 is that of the samples, and of lists
    with one string or number per sample, in dictionaries, lists and tuples. Other batches need `split_batch`.

    Before each step the random states are recorded, and buffers and metrics of the model are copied, so that a failed
    step can be undone. Attributes that training_step itself changes, such as a counter, are not restored.

    | logged | meaning |
    | --- | --- |
    | `memory/oom_recoveries` | the number of steps that were run again so far |
    | `memory/micro_batches` | the number of parts in the latest of these steps |

    Args:
        loss: "mean" or "sum" over the samples of the batch. There is no default: a wrong value gives wrong gradients.
        loss_weight: A function of a batch, for a loss that is a mean over something other than samples, such as tokens:
            it returns how many of them the batch has. A part for which it returns 0 is skipped.
        max_splits: The maximum number of micro-batches per batch.
        split_batch: A function `(batch, n_parts) -> parts` for other batches. If dimension 0 of a part's tensors is not
            always the number of samples, `loss_weight` has to return that number.
        allow_batch_norm: Split training batches even though BatchNorm then normalizes each part with its own
            statistics. Without this, such a model's training batches are not split.

    Raises:
        ValueError: An argument has a value that is not accepted; or, when fit begins, the strategy is not supported.
        TypeError: `max_splits` is not a whole number.
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
            kind = ValueError if isinstance(max_splits, int) else TypeError
            raise kind(f"max_splits must be a whole number, at least 2, got {max_splits!r}.")
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
                raise TypeError(f"{name} must be a function, got {function!r}.")
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
        """Raise ValueError under a strategy in which a rank that fails would leave the others waiting."""
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
        """Log the recoveries on this rank, and those on other ranks that are known by now."""
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
        """Return a line for MemoryMonitor's summary on the recoveries of this rank and those known of other ranks."""
        others = (f"Rank {rank}: {text}" for rank, text, _ in self._others() if text)
        return " ".join(filter(None, [str(self.recoveries), *others]))

    def _tell(self, trainer: Trainer, elsewhere: int) -> None:
        """Log new recoveries, tell the other ranks, and warn. Let OOMReport write a report on the first recovery."""
        mine, before = self.recoveries, self._told
        self._told = (mine.n_recovered, elsewhere)
        if self._told == before or self._posts is None:
            return
        self._posts.post({"told": [str(mine), mine.n_recovered]})
        if mine.n_recovered and not before[0]:
            warnings.warn(f"OOMRecovery: {mine.latest}", FindingWarning, stacklevel=2)
            for callback in callbacks_of(trainer):
                if isinstance(callback, OOMReport) and not any(before):
                    callback.report_recovered(trainer, mine.latest)
        scalars = {"memory/oom_recoveries": mine.n_recovered + elsewhere, "memory/micro_batches": mine.n_parts}
        log_scalars(trainer, scalars, training_step(trainer))

    def _others(self) -> list[tuple[int, str, int]]:
        """Return (rank, summary line, number of recoveries) of each other rank that has reported recoveries so far."""
        if self._posts is None:
            return []
        mine, posted = self._posts.rank, enumerate(self._posts.read())
        return [(rank, *post.values["told"]) for rank, post in posted if post.values and rank != mine]

    def _stop(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = None
