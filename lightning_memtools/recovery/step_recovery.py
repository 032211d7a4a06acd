"""Runs a step that ran out of memory again as micro-batches, whose gradients add up to those of the whole batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_memtools._torch import AnyBatchNorm, StatisticsNorm, has_accumulation_hook
from lightning_memtools.memory.error_frames import forget_frames, in_one_line
from lightning_memtools.memory.nested_tensors import in_new_containers, tensors_in
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.memory.release_failed_step import release_cached
from lightning_memtools.recovery.batch_parts import CannotSplitError, n_samples_of, split_plainly
from lightning_memtools.recovery.gradient_exchange import GradientExchange, no_collectives
from lightning_memtools.recovery.step_start import StepStart, TrainedState
from lightning_memtools.warning_categories import DegradedWarning

if TYPE_CHECKING:
    from lightning_memtools._lightning import StepClosure

MANUAL_OPTIMIZATION = "in manual optimization training_step steps optimizers itself, and that cannot be taken back"


@dataclass(slots=True)
class Recoveries:
    """Counts the batches that ran again in parts. `n_parts` is the number of parts in the latest step."""

    n_recovered: int = 0
    n_parts: int = 1
    most_parts: int = 1
    latest: str = ""

    def __str__(self) -> str:
        """Return these counts as a line for a summary; "" if no batch was recovered."""
        if not self.latest:
            return ""
        batches = "1 batch" if self.n_recovered == 1 else f"{self.n_recovered} batches"
        return f"OOMRecovery: {batches} ran out of memory and ran again in up to {self.most_parts} parts."


class StepRecovery:
    """Runs training steps. If a step runs out of memory, undoes it and runs its batch again in 2, 4, ... parts.

    Args:
        strategy: The Trainer's strategy; None without a Trainer.
        tell: A function that is called after the first step if batches cannot be run in parts, with the reason.

    The other arguments are those of OOMRecovery.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        max_splits: int,
        loss: Literal["mean", "sum"],
        allow_batch_norm: bool,
        split: Callable[[Any, int], Any] | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        strategy: Any = None,
        tell: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.recoveries = Recoveries()
        self._state = TrainedState(model, device)
        self._max_splits = max_splits
        self._loss = loss
        self._split = split
        self._loss_weight = loss_weight
        self._exchange = GradientExchange(strategy)
        self._tell: Callable[[str], None] | None = tell
        self._norms = [] if allow_batch_norm else norms_of(model)
        self._too_large = math.inf  # the elements of the smallest part that did not fit

    def run(self, step: StepClosure) -> Any:
        """Run a step, in parts if needed. Return the result (of the last part), with the loss of the whole batch.

        Raises:
            torch.OutOfMemoryError: The step does not fit, even in parts. A note on the error says why.
        """
        self._exchange.begin()
        start = self._start_of(step)
        return self._run_once(step) if start is None else self._run(start)

    def _start_of(self, step: StepClosure) -> StepStart | None:
        """Record and return the state before a step. Return None if a failed step could not be run again."""
        # In the first step, forward may still put its norms into evaluation mode.
        if self._tell is None and why_norm_prevents(self._norms):
            return None
        try:
            return StepStart(step, self._state)
        except Exception as fault:  # noqa: BLE001, ours: the step itself goes on
            _warn_of(fault)
            return None

    def _run_once(self, step: StepClosure) -> Any:
        try:
            result = step.forward(step.batch)
            if step.zero_grad is not None:
                step.zero_grad()
            if result.closure_loss is not None:
                step.backward(result.closure_loss)
        except Exception as error:
            if is_out_of_memory(error):
                _add_reason(error, self._why_not() or "OOMRecovery itself failed before it")
            raise
        return result

    def _run(self, start: StepStart) -> Any:
        """Run a step, in parts if needed, and return its result."""
        try:
            return self._attempts(start)
        except Exception as error:
            if start.failure is None or is_out_of_memory(error):
                raise
            is_refused = isinstance(error, CannotSplitError)
            if error is start.raised and not is_refused:
                error.add_note("OOMRecovery ran this batch in parts when this was raised: it did not fit as a whole")
                raise error from start.failure
            _add_reason(start.failure, str(error) if is_refused else _warn_of(error))
            forget_frames(error)
            with suppress(Exception):
                start.take_back()
            raise start.failure from None
        finally:
            start.failure = None  # its frames hold the start

    def _attempts(self, start: StepStart) -> Any:
        """Run the batch in 1, 2, 4, ... parts until they fit, and return the result."""
        n_elements = sum(map(torch.numel, tensors_in(start.batch)))
        n_parts, is_recovering = self._first_parts(n_elements), False
        if n_parts > 1:
            start.failure = torch.OutOfMemoryError("Out of memory: a batch of this size did not fit before.")
        while True:
            try:
                with self._exchange.run_of_step(n_parts):
                    result = start.run_whole() if n_parts == 1 else self._run_parts(start, n_parts)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                start.failure = error
            completed = start.completed()
            if reason := start.take_back() or self._why_not():
                raise CannotSplitError(reason)
            forget_frames(start.failure)  # they hold the step's tensors
            release_cached(self._state.device)
            self._too_large = min(self._too_large, n_elements / n_parts)
            n_parts, is_recovering = self._more_parts(start, n_parts), True
            if reason := self._exchange.leave(completed, keeps=bool(start.kept)):
                raise CannotSplitError(reason)
        if n_parts > 1:
            self._exchange.rejoin()
        self._note(start, n_parts, is_recovering=is_recovering)
        return result

    def _first_parts(self, n_elements: int) -> int:
        """Return how many parts to try first. Each is to be smaller than every part or batch that ran out of memory."""
        n_parts = 1
        while n_parts < self._max_splits and n_elements / n_parts >= self._too_large:
            n_parts = min(2 * n_parts, self._max_splits)
        return n_parts

    def _run_parts(self, start: StepStart, n_parts: int) -> Any:
        """Run the parts of a batch. Return the result of the last part, with the loss of the whole batch."""
        losses: list[Any] = []
        result: Any = None
        start.set_gradients_aside()
        with no_collectives():
            for part, factor in self._parts_of(start.batch, n_parts):
                result = start.run_part(part, factor)
                losses.append(result.closure_loss)
        start.add_gradients_set_aside()
        n_missing = sum(loss is None for loss in losses)
        if 0 < n_missing < len(losses):
            raise CannotSplitError(f"training_step returned no loss for {n_missing} of its {len(losses)} parts")
        return result if n_missing else replace(result, closure_loss=sum(losses))

    def _parts_of(self, batch: Any, n_parts: int) -> list[tuple[Any, float]]:
        """Return (part, loss weight) for each part of a batch. Parts with a weight of 0 are left out.

        Raises:
            CannotSplitError: The batch cannot be split, or its parts do not have as many samples as the batch.
        """
        count, counts, total = self._loss_weight or n_samples_of, [1.0], 1.0
        try:
            if self._split is None:
                parts = split_plainly(batch, n_parts)
            else:
                parts = list(self._split(in_new_containers(batch), n_parts))
            if self._loss == "mean":
                *counts, total = (float(count(one)) for one in (*parts, batch))
        except Exception as error:
            if isinstance(error, CannotSplitError) or is_out_of_memory(error):
                raise
            raise CannotSplitError(f"split_batch or loss_weight raised {in_one_line(error)}") from error
        are_counts = parts and total > 0 and all(0 <= each < math.inf for each in counts)
        if not are_counts or not math.isclose(sum(counts), total, rel_tol=1e-5):
            unit = "samples" if self._loss_weight is None else "as loss_weight= counts"
            raise CannotSplitError(f"its {len(parts)} parts of {counts} {unit} are not the batch of {total}")
        if self._loss == "sum":
            return [(part, 1.0) for part in parts]
        # A part without any token has no mean.
        return [(part, each / total) for part, each in zip(parts, counts, strict=True) if each]

    def _more_parts(self, start: StepStart, n_parts: int) -> int:
        """Return the number of parts to try next.

        Raises:
            CannotSplitError: The batch cannot be split into more parts.
        """
        n_samples = self._max_splits + 1 if self._split else n_samples_of(start.batch)  # or not known
        if n_parts < (most := min(self._max_splits, n_samples)):
            return min(2 * n_parts, most)
        if n_samples <= self._max_splits:
            raise CannotSplitError(f"each of its {n_samples} samples alone is too large")
        raise CannotSplitError(f"even max_splits={self._max_splits} parts are too large; a larger max_splits may help")

    def _why_not(self) -> str:
        """Return the reason why batches of this model cannot be run in parts; "" if they can."""
        if any(map(has_accumulation_hook, self._state.parameters)):
            return (
                "register_post_accumulate_grad_hook was called on its parameters: such a hook runs in each part, and "
                "one that updates weights in the backward pass cannot be taken back"
            )
        return why_norm_prevents(self._norms)

    def _note(self, start: StepStart, n_parts: int, *, is_recovering: bool) -> None:
        """Count a step (a recovery if `is_recovering`). After the first, tell the user if batches cannot be split."""
        told = self.recoveries
        told.n_parts, told.most_parts = n_parts, max(n_parts, told.most_parts)
        if is_recovering:
            told.n_recovered += 1
            over = "its samples" if self._loss_weight is None else "what loss_weight= counts"
            told.latest = (
                f"A batch ran out of memory and was run again in {n_parts} parts. "
                f"Its loss counts as the {self._loss} over {over}."
            )
        tell, self._tell = self._tell, None
        if tell is None:
            return
        reason = self._why_not()
        try:
            self._parts_of(start.batch, 2)
        except Exception as error:  # noqa: BLE001, also whatever a function of the user's raises
            reason = reason or str(error)
        if reason:
            tell(reason)


def norms_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) for each layer that can normalize by batch statistics, such as BatchNorm."""
    return [(name, part) for name, part in model.named_modules() if isinstance(part, StatisticsNorm)]


def why_norm_prevents(norms: Iterable[tuple[str, Any]]) -> str:
    """Return the reason not to split batches: a layer that normalizes by batch statistics. Return "" if none does."""
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


def _add_reason(error: Exception, why_not: str) -> None:
    error.add_note(f"OOMRecovery did not run this step again: {why_not}.")


def _warn_of(fault: Exception) -> str:
    """Warn of an error in OOMRecovery's own code, instead of raising it. Return the warning's message."""
    text = f"OOMRecovery itself failed: {in_one_line(fault)}"
    with suppress(DegradedWarning):  # where warnings are errors
        warnings.warn(text, DegradedWarning, stacklevel=2)
    return text
