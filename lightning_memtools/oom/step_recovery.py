"""Runs a step that ran out of memory again, as micro-batches that give what the whole batch would have given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torchmetrics import Metric

from lightning_memtools._torch import AnyBatchNorm, StatisticsNorm, has_accumulation_hook
from lightning_memtools.memory.error_frames import forget_frames
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.oom.batch_parts import CannotSplitError, n_samples_in, split_batch
from lightning_memtools.oom.gradient_exchange import ONE_RANK, GradientExchange, no_collectives
from lightning_memtools.oom.joined_outputs import join_parts, weighted_mean
from lightning_memtools.oom.known_sizes import KnownSizes
from lightning_memtools.oom.logged_parts import logged_by_whole
from lightning_memtools.oom.loss_proof import LossKind, LossProof
from lightning_memtools.oom.release_failed_step import release_cached
from lightning_memtools.oom.step_start import BatchStep, RandomReader, StepBuffers, StepStart

# Of the batches that are split from the beginning, the loss of the first ten is tried, and then of every tenth.
_TRIED_FIRST = 10
# The samples of a trial, where they fit: two and three, because some models do not work with a single one.
_TRIED_SAMPLES = 5


@dataclass(slots=True)
class Recoveries:
    """The recoveries so far.

    Attributes:
        n_recovered: The batches that ran out of memory and were run again in parts.
        n_skipped: The batches that were skipped.
        n_parts: The number of parts of the latest batch; 1 for a whole one.
        most_parts: The largest number of parts of a batch.
        latest: The latest recovery, as a sentence; "" if there was none.
    """

    n_recovered: int = 0
    n_skipped: int = 0
    n_parts: int = 1
    most_parts: int = 1
    latest: str = ""

    def __str__(self) -> str:
        """Return a line for a summary; "" where nothing happened."""
        if not self.latest:
            return ""
        one = self.n_recovered == 1
        batches = f"{self.n_recovered} batch{'' if one else 'es'} ran out of memory and {'was' if one else 'were'}"
        return f"OOMRecovery: {batches} run again in up to {self.most_parts} parts; {self.n_skipped} were skipped."


class StepRecovery:
    """Runs steps; one that runs out of memory is taken back and run again in 2, 4, ... parts.

    Taken back are gradients (bit for bit), buffers, metrics, random streams and logged values. A Python attribute that
    the step itself changes, such as a counter, is not.

    Args:
        model: The model.
        device: Where it is.
        max_splits: The largest number of parts.
        skip_batch: Skip a training batch that does not fit in the smallest parts.
        loss: The loss of a batch is the mean or the sum over its samples; "auto" tries a few samples of the first
            batch, and of batches that are split.
        allow_batch_norm: Split though BatchNorm then normalizes with the statistics of each part.
        split: The user's function `(batch, n_parts) -> parts`.
        loss_weight: The user's function `(batch) -> number`: over how much of a batch its loss is a mean, in place of
            the number of samples.
        exchange: How the ranks average gradients.
        tell: Takes the reason why batches cannot be split, if the first training batch shows one. Without it, nothing
            is looked at before memory runs out.

    Attributes:
        recoveries: The numbers of what happened.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        max_splits: int,
        skip_batch: bool,
        loss: Literal["auto", "mean", "sum"],
        allow_batch_norm: bool,
        split: Callable[[Any, int], Any] | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        exchange: GradientExchange = ONE_RANK,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.recoveries = Recoveries()
        self.model = model
        self.device = device
        self.max_splits = max_splits
        self.skip_batch = skip_batch
        self._is_trying = loss == "auto"
        self._kind: LossKind | None = None if loss == "auto" else loss
        self._allow_batch_norm = allow_batch_norm
        self._exchange = exchange
        self.random = RandomReader(device)
        # Training and evaluation write different ones.
        self._buffers = {True: StepBuffers(model), False: StepBuffers(model)}
        self.parameters = list(model.parameters())  # those that are frozen now may be trained later
        self._norms = [(name, part) for name, part in model.named_modules() if isinstance(part, StatisticsNorm)]
        self.metrics = [module for module in model.modules() if isinstance(module, Metric)]
        self.split = split
        self._proof = LossProof(model, self.parameters, split=split, weight=loss_weight)
        self._n_planned = 0
        self._n_cut = 0
        self._tell = tell
        # Evaluation needs less memory than training.
        self.sizes = {True: KnownSizes(), False: KnownSizes()}

    def close(self) -> None:
        """End what the steps of one call of the Trainer needed."""

    def run(self, step: BatchStep) -> Any:
        """Run a step and return its result, or that of its parts together.

        Raises:
            torch.OutOfMemoryError: It cannot be run in parts, or not in small enough ones; a note says why.
        """
        if step.backward is None or step.skipped is None:
            return self.run_on_this_rank(step, ONE_RANK)
        n_before = self.recoveries.n_skipped
        self._exchange.begin()
        result = self.run_on_this_rank(step, self._exchange)
        is_skipped = self.recoveries.n_skipped > n_before
        if not self._exchange.any_rank(is_skipped):
            return result
        for parameter in self.parameters if step.zero_grad is not None else ():
            parameter.grad = None
        if not is_skipped:
            self.recoveries.n_skipped += 1
            self.recoveries.latest = (
                "A batch was skipped, because another rank ran out of memory even with the smallest parts of its batch."
            )
        return step.skipped()

    def run_on_this_rank(self, step: BatchStep, exchange: GradientExchange) -> Any:
        """Run a step as `run` does, without telling other ranks if it is skipped."""
        sizes = self.sizes[step.backward is None]
        known = sizes.of(step.batch)
        n_parts = sizes.parts_to_try(known)
        before = StepStart(step, self.parameters, self.metrics, self.noted_buffers(step), self.random())
        self.look_at_first(step)
        may_try = self._is_trying and step.backward is not None
        is_to_try = may_try and n_parts > 1 and self._is_due()
        is_recovering, text = False, "Out of memory: a batch of this size did not fit before."
        while True:
            try:
                if is_to_try:
                    self._try_loss(step, n_parts, before, exchange)
                    is_to_try = may_try = False
                with exchange.run_of_step(n_parts):
                    result = self._attempt(step, n_parts, before, exchange)
            except CannotSplitError as error:
                before.take_back()
                forget_frames(error)
                raise torch.OutOfMemoryError(f"{text}\nOOMRecovery did not run this step in parts: {error}.") from None
            except Exception as error:
                if not is_out_of_memory(error):
                    _tell_of_parts(error, n_parts, text)
                    raise
                complete = before.completed()
                more, why_not = self._after_failure(step, n_parts, before)
                if why_not:
                    error.add_note(f"OOMRecovery did not run this step again: {why_not}.")
                    raise
                text = str(error).partition("\n")[0]
                forget_frames(error)
            else:
                break
            release_cached(self.device)  # after the handler: until then the error holds the step's tensors
            if why_not := exchange.leave(complete, keeps=before.is_partly_added):
                raise torch.OutOfMemoryError(f"{text}\nOOMRecovery did not run this step again: {why_not}.")
            if more is None:
                return self.skip(step, before, exchange, text)
            known = sizes.remember(step.batch, known, more)
            n_parts, is_recovering, is_to_try = more, True, may_try
        sizes.note_success(known, n_parts)
        self.end(step, n_parts, exchange, is_recovering=is_recovering)
        return result

    def _after_failure(self, step: BatchStep, n_parts: int, before: StepStart) -> tuple[int | None, str]:
        """Take the step back; return how many parts to try, None to skip it, and the reason why it fails, else ""."""
        why_not = before.take_back() or self.why_not(step)
        more = None if why_not else self.next(step, n_parts)
        if not why_not and more is None:
            may_skip = self.skip_batch and step.skipped is not None and not before.is_partly_added
            why_not = "" if may_skip else self.too_small(step)
        return more, why_not

    def _attempt(self, step: BatchStep, n_parts: int, before: StepStart, exchange: GradientExchange) -> Any:
        if n_parts == 1:
            return before.run_part(step, step.batch, 1.0)
        parts = self.parts(step, n_parts)
        before.set_gradients_aside()
        with no_collectives():
            result = self.run_parts(step, parts, before, exchange)
        before.add_gradients_set_aside()
        return result

    def parts(self, step: BatchStep, n_parts: int) -> list[tuple[Any, int, float]]:
        """Return the parts of the batch that add something, each with its number of samples and its weight."""
        cut = split_batch(step.batch, n_parts, self.split)
        self._n_cut = len(cut)  # the user's function may give another number
        if self._n_cut > self.max_splits:
            raise CannotSplitError(f"split_batch returned {self._n_cut} parts, and max_splits={self.max_splits}")
        if step.backward is None:
            return [(*part, weight) for part, weight in zip(cut, self._proof.known_weights_of(cut), strict=True)]
        # A part without any token has no mean, and adds nothing to that of the batch.
        pairs = zip(cut, self._proof.weights_of(cut), strict=True)
        return [(*part, weight) for part, weight in pairs if weight or self._kind == "sum"]

    def run_parts(
        self, step: BatchStep, used: list[tuple[Any, int, float]], before: StepStart, exchange: GradientExchange
    ) -> Any:
        """Run parts, each with its number of samples and its weight, and return the result of all together."""
        parts, counts, weights = zip(*used, strict=True)
        results, logged = [], []
        for part, weight in zip(parts, weights, strict=True):
            if why_not := exchange.why_late():
                raise CannotSplitError(why_not)
            with step.log.running(part):
                results.append(before.run_part(step, part, 1.0 if self._kind == "sum" else weight / sum(weights)))
            logged.append(step.log.of_part())
        if step.backward is not None and self._kind is None:
            raise CannotSplitError(
                'two samples together do not fit, so the loss cannot be tried; loss="mean" or loss="sum" says how it '
                "depends on the samples"
            )
        losses = [] if step.backward is None else [one.closure_loss for one in results]
        has_losses = [loss is not None for loss in losses]
        if any(has_losses) and not all(has_losses):
            raise CannotSplitError("training_step returned no loss for some of its parts")
        step.log.put(
            step.batch,
            logged_by_whole(
                n_samples_in(step.batch) or sum(counts),
                partial(step.log.size_of, step.batch),
                logged,
                counts,
                weights=weights if self._proof.is_weighted else None,
                losses=[loss * step.log.loss_divisor for loss in losses] if any(has_losses) else None,
                adds=self._kind == "sum",
            ),
        )
        if step.backward is None:
            return join_parts(results, counts, weights, is_strict=True)
        whole = None
        if any(has_losses):
            whole = sum(losses[1:], losses[0]) if self._kind == "sum" else weighted_mean(losses, weights)
        return replace(
            results[0], closure_loss=whole, extra=join_parts([one.extra for one in results], counts, weights)
        )

    def why_not(self, step: BatchStep) -> str:
        """Return the reason why a step must not be run in parts; "" where it may."""
        if not self._allow_batch_norm and (norm := self.norm_over_batch()):
            return (
                f"{norm} normalizes with the statistics of its batch, and those of a part differ; "
                "allow_batch_norm=True accepts that"
            )
        if step.backward is not None and any(map(has_accumulation_hook, self.parameters)):
            return (
                "register_post_accumulate_grad_hook was called on its parameters: such a hook runs in each part, and "
                "one that updates weights in the backward pass cannot be taken back"
            )
        try:
            parts = split_batch(step.batch, 2, self.split)
            if step.backward is not None:
                self._proof.weights_of(parts)
        except CannotSplitError as error:
            return str(error)
        return ""

    def noted_buffers(self, step: BatchStep) -> StepBuffers | None:
        """Note or copy the buffers; None where the step would not be run again."""
        normalizes = self.norm_over_batch() is not None
        if normalizes and step.backward is not None and not self._allow_batch_norm:
            return None
        buffers = self._buffers[step.backward is None]
        buffers.start(uncounted=normalizes)
        return buffers

    def norm_over_batch(self) -> str | None:
        """Return the name of the first module that normalizes with statistics of the batch now."""
        for name, module in self._norms:
            is_batch_norm = isinstance(module, AnyBatchNorm)
            if (module.training and (is_batch_norm or module.track_running_stats)) or (
                is_batch_norm and module.running_mean is None
            ):
                return str(name)
        return None

    def next(self, step: BatchStep, n_parts: int) -> int | None:
        """Return how many parts to try next; None where the batch has no smaller ones."""
        n_samples = n_samples_in(step.batch)
        largest = self.max_splits if n_samples is None else min(self.max_splits, n_samples)
        return min(2 * n_parts, largest) if n_parts < largest else None

    def too_small(self, step: BatchStep) -> str:
        """Return the reason why there are no smaller parts."""
        n_samples = n_samples_in(step.batch)
        if n_samples is not None and n_samples <= self.max_splits:
            return f"each of its {n_samples} samples alone is too large; skip_batch=True skips such a batch"
        return f"even max_splits={self.max_splits} parts are too large; a larger max_splits allows smaller ones"

    def skip(self, step: BatchStep, before: StepStart, exchange: GradientExchange, text: str) -> Any:
        """Skip a batch and return its result."""
        before.zero_once()
        exchange.rejoin()
        self.recoveries.n_skipped += 1
        self.recoveries.latest = f"A batch was skipped: even its smallest parts ran out of memory. ({text})"
        assert step.skipped is not None
        return step.skipped()

    def end(self, step: BatchStep, n_parts: int, exchange: GradientExchange, *, is_recovering: bool) -> None:
        """Note that a batch has run in so many parts."""
        if n_parts > 1:
            exchange.rejoin()
        n_run = 1 if n_parts == 1 else self._n_cut
        self.recoveries.n_parts = n_run
        self.recoveries.most_parts = max(n_run, self.recoveries.most_parts)
        if is_recovering:
            self.recoveries.n_recovered += 1
            self.recoveries.latest = (
                f"A batch of {n_samples_in(step.batch)} samples ran out of memory and was run again in {n_run} parts."
                + (f" Its loss is the {self._kind} over its samples." if step.backward is not None else "")
            )

    def look_at_first(self, step: BatchStep) -> None:
        """Tell from the first training batch if batches cannot be split, so that nobody learns it late.

        The loss is tried only once memory has run out: a trial runs the step again, and not all that a step may write
        can be restored. A run that has memory enough must not differ from one without this callback.
        """
        if self._tell is None or step.backward is None:
            return
        tell, self._tell = self._tell, None
        if reason := self.why_not(step):
            tell(reason)

    def _is_due(self) -> bool:
        """Return whether to try the loss of a batch that is split from the beginning, because batches differ."""
        self._n_planned += 1
        return self._n_planned <= _TRIED_FIRST or self._n_planned % _TRIED_FIRST == 0

    def _try_loss(self, step: BatchStep, n_parts: int, before: StepStart, exchange: GradientExchange) -> None:
        """Find out of what kind the loss is, from a few samples. The step is as at its beginning afterwards.

        Raises:
            CannotSplitError: It is none that can be split, or that is not known.
            torch.OutOfMemoryError: The samples do not fit.
        """
        most = max(2, min(_TRIED_SAMPLES, (n_samples_in(step.batch) or _TRIED_SAMPLES) // n_parts))
        unrestored = ""
        try:
            before.zero_once()
            before.set_gradients_aside()
            with exchange.alone():
                self._kind = self._proof.kind(step, most)
        except CannotSplitError:
            raise
        except Exception as error:  # whatever the step raises on a part
            if not is_out_of_memory(error):
                name = type(error).__name__
                raise CannotSplitError(f"a trial with some of its samples raised {name}: {error}") from error
            if n_samples_in(step.batch) != n_parts:
                raise  # as the parts themselves would
            forget_frames(error)  # each part is one sample, and an earlier batch may have shown the kind
        finally:
            unrestored = before.take_back()
        if unrestored:
            raise CannotSplitError(unrestored)


def _tell_of_parts(error: Exception, n_parts: int, text: str) -> None:
    """Say that an error was raised while a batch ran in parts, which the whole batch may not raise."""
    if n_parts == 1:
        return
    error.add_note(f"OOMRecovery ran this batch in {n_parts} parts when this was raised, after: {text}")
    if error.__context__ is None:
        error.__context__ = torch.OutOfMemoryError(text)
