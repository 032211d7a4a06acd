"""Runs a step that ran out of memory again, as micro-batches that give what the whole batch would have given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torchmetrics import Metric

from lightning_memtools._torch import AnyBatchNorm, StatisticsNorm, has_accumulation_hook
from lightning_memtools.memory.error_frames import forget_frames
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.memory.release_failed_step import release_cached
from lightning_memtools.recovery.batch_parts import CannotSplitError, cut_batch, n_samples_in
from lightning_memtools.recovery.gradient_exchange import ONE_RANK, GradientExchange, no_collectives
from lightning_memtools.recovery.joined_parts import join_parts, logged_by_whole, weighted_mean
from lightning_memtools.recovery.loss_proof import LossKind, LossProof
from lightning_memtools.recovery.step_start import BatchStep, StepStart
from lightning_memtools.state.buffer_keeper import BufferKeeper
from lightning_memtools.state.random_state import RandomState

MANUAL_OPTIMIZATION = "in manual optimization training_step steps optimizers itself, and that cannot be taken back"
_ASK_FOR_SIZES = (
    "let split_batch return pairs (part, number of samples), or give loss_weight=, a function that returns over how "
    "many things in a batch its loss is a mean"
)
# Of the batches that are split from the beginning, the loss of the first ten is tried, and then of every tenth.
_TRIED_FIRST = 10
# The samples of a trial, where they fit: two and three, because some models do not work with a single one.
_TRIED_SAMPLES = 5
# After this many batches in parts, one is tried in half as many; if that fails, the next try comes twice as late.
_TRY_FEWER_AFTER = 50


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
        batches = (
            "1 batch ran out of memory and was"
            if self.n_recovered == 1
            else (f"{self.n_recovered} batches ran out of memory and were")
        )
        return f"OOMRecovery: {batches} run again in up to {self.most_parts} parts; {self.n_skipped} were skipped."


@dataclass(slots=True)
class _KnownSize:
    """The number of parts that batches with at least so many elements need."""

    n_elements: int
    n_parts: int
    n_until_fewer: int = _TRY_FEWER_AFTER
    patience: int = _TRY_FEWER_AFTER

    def parts_to_try(self) -> int:
        self.n_until_fewer -= 1
        if self.n_until_fewer > 0:
            return self.n_parts
        self.patience *= 2
        self.n_until_fewer = self.patience  # batches of other sizes may share this entry
        return max(1, self.n_parts // 2)


class _KnownSizes:
    """The sizes of batches that did not fit whole, so that the next ones need not fail first."""

    def __init__(self) -> None:
        self._sizes: list[_KnownSize] = []

    def of(self, batch: Any) -> _KnownSize | None:
        """Return the entry with the most parts among those for batches that are no larger."""
        if not self._sizes:
            return None
        n_elements = _n_elements(batch)
        fitting = [one for one in self._sizes if one.n_elements <= n_elements]
        return max(fitting, key=lambda one: one.n_parts, default=None)

    def note(self, batch: Any, known: _KnownSize | None, n_parts: int, *, fits: bool) -> _KnownSize | None:
        """Note that a batch needs more parts than tried, or that it fits in so many; return its entry."""
        if fits and (known is None or n_parts >= known.n_parts):
            return known
        if not fits and (known is None or known.n_elements < _n_elements(batch)):
            known = _KnownSize(_n_elements(batch), n_parts)
            self._sizes.append(known)
        assert known is not None
        known.n_parts, known.n_until_fewer = n_parts, known.patience
        self._sizes = [one for one in self._sizes if one.n_parts > 1]
        return known


class StepRecovery:
    """Runs steps; one that runs out of memory is taken back and run again in 2, 4, ... parts.

    Gradients (bit for bit), buffers, metrics, random streams and logged values are restored first. A Python attribute
    that the step itself changes, such as a counter, is not.

    Args:
        exchange: How the ranks average gradients.
        tell: Called if the first training batch shows why batches cannot be split, with the reason.

    The other arguments are those of OOMRecovery.
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
        self._device = device
        self._max_splits = max_splits
        self._skip_batch = skip_batch
        self._declared: LossKind | None = None if loss == "auto" else loss
        self._kind = self._declared
        # The reason why the norms prevented a split when the last step's forward pass had run; None before the first.
        self._norm_reason: str | None = None
        self._allow_batch_norm = allow_batch_norm
        self._split = split
        self._exchange = exchange
        self._tell = tell
        self._is_announced = False
        self._parameters = list(model.parameters())  # those that are frozen now may be trained later
        self._norms = norms_of(model)
        self._metrics = [module for module in model.modules() if isinstance(module, Metric)]
        self._proof = LossProof(model, self._parameters, split=split, weight=loss_weight)
        self._n_planned = 0
        self._n_cut = 0
        self._buffers = BufferKeeper(model)
        # Evaluation needs less memory than training.
        self._sizes = {True: _KnownSizes(), False: _KnownSizes()}

    def run(self, step: BatchStep) -> Any:
        """Run a step and return its result, or that of its parts together.

        Raises:
            torch.OutOfMemoryError: It cannot be run in parts, or not in small enough ones; a note says why.
        """
        exchange = ONE_RANK if step.backward is None else self._exchange
        exchange.begin()
        n_before = self.recoveries.n_skipped
        result = self._run(step, exchange)
        is_skipped = self.recoveries.n_skipped > n_before
        if not exchange.any_rank(is_skipped):
            return result
        for parameter in self._parameters if step.zero_grad is not None else ():
            parameter.grad = None
        if not is_skipped:
            self.recoveries.n_skipped += 1
            self.recoveries.latest = (
                "A batch was skipped, because another rank ran out of memory even with the smallest parts of its batch."
            )
        assert step.skipped is not None
        return step.skipped()

    def _run(self, step: BatchStep, exchange: GradientExchange) -> Any:
        """Run a step; None if it is skipped."""
        sizes = self._sizes[step.backward is None]
        known = sizes.of(step.batch)
        n_parts = 1 if known is None else known.parts_to_try()
        random = RandomState.now(device=self._device)
        before = StepStart(step, self._parameters, self._metrics, self._copied_buffers(step), random)
        self._tell_of_first(step)
        is_tried, is_to_try = False, n_parts > 1 and self._must_try(step) and self._is_due()
        is_recovering, text = False, "Out of memory: a batch of this size did not fit before."
        while True:
            try:
                if is_to_try:
                    self._try_loss(step, n_parts, before, exchange)
                    is_tried, is_to_try = True, False
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
                if why_not := before.take_back() or self._why_not(step, before):
                    raise _refused(error, why_not)  # noqa: B904, the same error
                text = str(error).partition("\n")[0]
                forget_frames(error)
                failure = error
            else:
                break
            more = self._parts_to_try(step, n_parts, before, failure)
            del failure
            if why_not := exchange.leave(complete, keeps=before.is_partly_added):
                raise torch.OutOfMemoryError(f"{text}\nOOMRecovery did not run this step again: {why_not}.")
            if more is None:
                self._skip(before, exchange, text)
                return None
            known = sizes.note(step.batch, known, more, fits=False)
            n_parts, is_recovering = more, True
            is_to_try = not is_tried and self._must_try(step)
        sizes.note(step.batch, known, n_parts, fits=True)
        self._end(step, n_parts, exchange, is_recovering=is_recovering)
        return result

    def _parts_to_try(self, step: BatchStep, n_parts: int, before: StepStart, failure: Exception) -> int | None:
        """Release what the failed step held, and return how many parts to try; None to skip the batch.

        Raises:
            Exception: The failure, with a note, where the step cannot be run in smaller parts.
        """
        # Outside of the handler, whose error holds the step's tensors: a split_batch of the user's may allocate.
        release_cached(self._device)
        more, why_not = self._smaller_parts(step, n_parts, before)
        if why_not:
            raise _refused(failure, why_not)
        return more

    def _skip(self, before: StepStart, exchange: GradientExchange, text: str) -> None:
        before.zero_once()
        exchange.rejoin()
        self.recoveries.n_skipped += 1
        self.recoveries.latest = f"A batch was skipped: even its smallest parts ran out of memory. ({text})"

    def _smaller_parts(self, step: BatchStep, n_parts: int, before: StepStart) -> tuple[int | None, str]:
        """Return how many parts to try, None to skip the step, and the reason why it fails, else ""."""
        if why_not := self._why_not_cut(step):
            return None, why_not
        n_samples = n_samples_in(step.batch)
        largest = min(self._max_splits, n_samples or self._max_splits)
        if n_parts < largest:
            return min(2 * n_parts, largest), ""
        if self._skip_batch and step.skipped is not None and not before.is_partly_added:
            return None, ""
        if n_samples is not None and n_samples <= self._max_splits:
            return None, f"each of its {n_samples} samples alone is too large; skip_batch=True skips such a batch"
        return None, (
            f"even max_splits={self._max_splits} parts are too large; a larger max_splits helps if a single sample fits"
        )

    def _attempt(self, step: BatchStep, n_parts: int, before: StepStart, exchange: GradientExchange) -> Any:
        if n_parts == 1:
            return before.run_part(step.batch, 1.0)
        parts = self._parts(step, n_parts)
        before.set_gradients_aside()
        with no_collectives():
            result = self._run_parts(step, parts, before, exchange)
        before.add_gradients_set_aside()
        return result

    def _parts(self, step: BatchStep, n_parts: int) -> list[tuple[Any, int, float]]:
        """Return the parts of the batch that add something, each with its number of samples and its weight."""
        cut = cut_batch(step.batch, n_parts, self._split).parts
        self._n_cut = len(cut)  # the user's function may give another number
        if self._n_cut > self._max_splits:
            raise CannotSplitError(f"split_batch returned {self._n_cut} parts, and max_splits={self._max_splits}")
        if step.backward is None:
            return [(*part, weight) for part, weight in zip(cut, self._proof.known_weights_of(cut), strict=True)]
        # A part without any token has no mean, and adds nothing to that of the batch.
        pairs = zip(cut, self._proof.weights_of(cut), strict=True)
        return [(*part, weight) for part, weight in pairs if weight or self._kind == "sum"]

    def _run_parts(
        self, step: BatchStep, used: list[tuple[Any, int, float]], before: StepStart, exchange: GradientExchange
    ) -> Any:
        """Run parts, each with its number of samples and its weight, and return the result of all together."""
        parts, counts, weights = zip(*used, strict=True)
        results, logged = [], []
        for part, weight in zip(parts, weights, strict=True):
            if why_not := exchange.why_late():
                raise CannotSplitError(why_not)
            with step.log.running(part):
                results.append(before.run_part(part, 1.0 if self._kind == "sum" else weight / sum(weights)))
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

    def _must_try(self, step: BatchStep) -> bool:
        """Return True if the loss of a step has to be tried before its batch is split."""
        return step.backward is not None and self._declared is None

    def _why_not(self, step: BatchStep, before: StepStart) -> str:
        """Return the reason why a step must not be run in parts, whatever its batch is; "" where it may."""
        if not self._allow_batch_norm:
            # Without copies of the buffers it cannot be run again, whatever the norms do by now.
            reason = why_norm_prevents(self._norms)
            if reason := reason or ("" if before.has_buffers or step.backward is None else self._norm_reason or ""):
                return reason
        return self._why_hooks_prevent(step)

    def _why_hooks_prevent(self, step: BatchStep) -> str:
        if step.backward is not None and any(map(has_accumulation_hook, self._parameters)):
            return (
                "register_post_accumulate_grad_hook was called on its parameters: such a hook runs in each part, and "
                "one that updates weights in the backward pass cannot be taken back"
            )
        return ""

    def _why_not_cut(self, step: BatchStep) -> str:
        """Return the reason why a batch cannot be cut into parts; "" where it can."""
        try:
            cut = cut_batch(step.batch, 2, self._split)
            if step.backward is not None:
                if not cut.is_counted and self._declared != "sum" and not self._proof.is_weighted:
                    return f"the samples of split_batch's parts cannot be counted; {_ASK_FOR_SIZES}"
                self._proof.weights_of(cut.parts)
        except CannotSplitError as error:
            return str(error)
        return ""

    def _copied_buffers(self, step: BatchStep) -> BufferKeeper | None:
        """Copy the buffers; None where the step would not be run again."""
        # In the first step, forward may still put its norms into evaluation mode.
        if step.backward is not None and self._norm_reason and why_norm_prevents(self._norms):
            return None
        self._buffers.keep()
        return self._buffers

    def _end(self, step: BatchStep, n_parts: int, exchange: GradientExchange, *, is_recovering: bool) -> None:
        if step.backward is not None and not self._allow_batch_norm:
            is_first, self._norm_reason = self._norm_reason is None, why_norm_prevents(self._norms)
            if is_first and self._norm_reason and self._tell is not None:
                self._tell(self._norm_reason)
        if n_parts > 1:
            exchange.rejoin()
            n_parts = self._n_cut
        found = self.recoveries
        found.n_parts, found.most_parts = n_parts, max(n_parts, found.most_parts)
        if is_recovering:
            found.n_recovered += 1
            found.latest = (
                f"A batch of {n_samples_in(step.batch)} samples ran out of memory and was run again in {n_parts} parts."
                + (f" Its loss is the {self._kind} over its samples." if step.backward is not None else "")
            )

    def _tell_of_first(self, step: BatchStep) -> None:
        """Warn at the first training batch if batches cannot be split.

        The loss is tried only once memory has run out: a trial runs the step again, and not all that a step may write
        can be restored. A run that has memory enough must not differ from one without this callback.
        """
        if self._tell is None or step.backward is None or self._is_announced:
            return
        self._is_announced = True
        # What its norms do is known when the first step has run.
        with suppress(torch.OutOfMemoryError):  # of split_batch, which needs less when a step has failed
            if reason := self._why_hooks_prevent(step) or self._why_not_cut(step):
                self._tell(reason)

    def _is_due(self) -> bool:
        """Return whether to try the loss of a batch that is split from the beginning, because batches differ."""
        self._n_planned += 1
        return self._n_planned <= _TRIED_FIRST or self._n_planned % _TRIED_FIRST == 0

    def _try_loss(self, step: BatchStep, n_parts: int, before: StepStart, exchange: GradientExchange) -> None:
        """Find out from a few samples whether the loss is a mean or a sum, and take the step back to its beginning.

        Raises:
            CannotSplitError: It is neither, or a sample shows nothing.
            torch.OutOfMemoryError: The samples do not fit.
        """
        n_samples = n_samples_in(step.batch)
        most = max(2, min(_TRIED_SAMPLES, (n_samples or _TRIED_SAMPLES) // n_parts))
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
            if n_samples != n_parts:
                raise  # as the parts themselves would
            forget_frames(error)  # each part is one sample, and an earlier batch may have shown the kind
        finally:
            unrestored = before.take_back()
        if unrestored:
            raise CannotSplitError(unrestored)


def norms_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules of a model that may normalize with the statistics of a batch, with their names."""
    return [(name, part) for name, part in model.named_modules() if isinstance(part, StatisticsNorm)]


def why_norm_prevents(norms: Iterable[tuple[str, Any]]) -> str:
    """Return the reason why batches must not be cut, if one of these normalizes with their statistics now; else ""."""
    for name, module in norms:
        is_batch_norm = isinstance(module, AnyBatchNorm)
        if (module.training and (is_batch_norm or module.track_running_stats)) or (
            is_batch_norm and module.running_mean is None
        ):
            return (
                f"{name} normalizes with the statistics of its batch, and those of a part differ; "
                "allow_batch_norm=True accepts that"
            )
    return ""


def _n_elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))


def _refused(error: Exception, why_not: str) -> Exception:
    error.add_note(f"OOMRecovery did not run this step again: {why_not}.")
    return error


def _tell_of_parts(error: Exception, n_parts: int, text: str) -> None:
    """Add a note to an error that was raised while a batch ran in parts: the whole batch might not raise it."""
    if n_parts == 1:
        return
    error.add_note(f"OOMRecovery ran this batch in {n_parts} parts when this was raised, after: {text}")
    if error.__context__ is None:
        error.__context__ = torch.OutOfMemoryError(text)
