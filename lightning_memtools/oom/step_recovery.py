"""Runs a step that ran out of memory again, as micro-batches that give what the whole batch would have given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torchmetrics import Metric

from lightning_memtools._torch import AnyBatchNorm, AnyDropout, StatisticsNorm
from lightning_memtools.memory.error_frames import forget_frames
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.oom.batch_parts import CannotSplitError, join_parts, n_samples_in, split_batch, weighted_mean
from lightning_memtools.oom.gradient_exchange import ONE_RANK, GradientExchange, no_collectives
from lightning_memtools.oom.release_failed_step import release_cached
from lightning_memtools.oom.step_start import BatchStep, RandomReader, StepBuffers, StepStart

LossKind = Literal["auto", "mean", "sum"]

# After so many batches that ran split, one is tried with half the splits; after a failure it takes twice as many.
_TRY_FEWER_AFTER = 50
# Rounding of a sum in another order, relative to the loss.
_COARSE_TOLERANCE = 2e-2


@dataclass(slots=True)
class _KnownSize:
    """The number of parts that batches with so many elements need.

    Attributes:
        n_elements: The elements of all tensors of the batch.
        n_parts: The number of parts.
        n_until_fewer: The number of batches until fewer are tried.
        patience: What that number begins with.
    """

    n_elements: int
    n_parts: int
    n_until_fewer: int = _TRY_FEWER_AFTER
    patience: int = _TRY_FEWER_AFTER


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
        split: The user's function `(batch, n_parts) -> parts`.
        loss: The loss of a batch is the mean or the sum over its samples; "auto" finds out at the first recovery.
        allow_batch_norm: Split though BatchNorm then normalizes with the statistics of each part.
        exchange: How the ranks average gradients.

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
        loss: LossKind,
        allow_batch_norm: bool,
        split: Callable[[Any, int], Any] | None = None,
        exchange: GradientExchange = ONE_RANK,
    ) -> None:
        self.recoveries = Recoveries()
        self._model = model
        self._device = device
        self._max_splits = max_splits
        self._skip_batch = skip_batch
        self._loss: LossKind = loss
        self._allow_batch_norm = allow_batch_norm
        self._exchange = exchange
        self._random = RandomReader(device)
        # Training and evaluation write different ones.
        self._buffers = {True: StepBuffers(model), False: StepBuffers(model)}
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._norms = [(name, part) for name, part in model.named_modules() if isinstance(part, StatisticsNorm)]
        self._metrics = [module for module in model.modules() if isinstance(module, Metric)]
        self._split = split
        # Evaluation needs less memory than training.
        self._known: dict[bool, list[_KnownSize]] = {True: [], False: []}

    def run(self, step: BatchStep) -> Any:
        """Run a step and return its result, or that of its parts together.

        Raises:
            torch.OutOfMemoryError: It cannot be run in parts, or not in small enough ones; a note says why.
        """
        if step.backward is None or step.skipped is None:
            return self._run(step, ONE_RANK)
        n_before = self.recoveries.n_skipped
        self._exchange.begin()
        result = self._run(step, self._exchange)
        is_skipped = self.recoveries.n_skipped > n_before
        if not self._exchange.any_rank(is_skipped):
            return result
        for parameter in self._parameters:
            parameter.grad = None
        if not is_skipped:
            self.recoveries.n_skipped += 1
            self.recoveries.latest = "A batch was skipped, because that of another rank ran out of memory in any parts."
        return step.skipped()

    def _run(self, step: BatchStep, exchange: GradientExchange) -> Any:
        known = self._known_size(step)
        n_parts = self._parts_to_try(known)
        before = StepStart(step, self._parameters, self._metrics, self._noted_buffers(step), self._random())
        is_recovering, text, refused = False, "", ""
        while True:
            try:
                with exchange.run_of_step(n_parts):
                    refused = self._prove_loss(step, n_parts, before) if is_recovering else ""
                    result = None if refused else self._attempt(step, n_parts, before)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                complete = before.completed()
                why_not = before.take_back() or self._why_not(step)
                more = None if why_not else self._next(step, n_parts)
                if more is None and (why_not or not self._skip_batch or step.skipped is None or before.is_partly_added):
                    error.add_note(f"OOMRecovery did not run this step again: {why_not or self._too_small(step)}.")
                    raise
                text = str(error).partition("\n")[0]
                forget_frames(error)
            else:
                break
            release_cached(self._device)  # after the handler: until then the error holds the step's tensors
            if why_not := exchange.leave(complete, keeps=before.is_partly_added):
                raise torch.OutOfMemoryError(f"{text}\nOOMRecovery did not run this step again: {why_not}.")
            if more is None:
                return self._skip(step, before, exchange, text)
            known = self._remember(step, known, more)
            n_parts, is_recovering = more, True
        if refused:
            raise torch.OutOfMemoryError(f"{text}\nOOMRecovery did not run this step in parts: {refused}")
        if n_parts > 1:
            exchange.rejoin()
        self._note_success(step, known, n_parts, is_recovering=is_recovering)
        return result

    def _attempt(self, step: BatchStep, n_parts: int, before: StepStart) -> Any:
        if n_parts == 1:
            return before.run_part(step, step.batch, 1.0)
        parts = split_batch(step.batch, n_parts, self._split)
        counts = [count for _, count in parts]
        before.set_gradients_aside()
        results, logged = [], []
        with no_collectives():
            for part, count in parts:
                step.log.begin_part(part)
                weight = 1.0 if self._loss == "sum" else count / sum(counts)
                results.append(before.run_part(step, part, weight))
                logged.append(step.log.values())
        before.add_gradients_set_aside()
        step.log.put_mean(logged, counts)
        step.log.begin_part(step.batch)
        if step.backward is None:
            return join_parts(results, counts)
        losses = [one.closure_loss for one in results]
        whole = None
        if all(loss is not None for loss in losses):
            whole = sum(losses[1:], losses[0]) if self._loss == "sum" else weighted_mean(losses, counts)
        return replace(results[0], closure_loss=whole, extra=join_parts([one.extra for one in results], counts))

    def _why_not(self, step: BatchStep) -> str:
        """Return the reason why a step must not be run in parts; "" where it may."""
        if step.backward is not None and not self._allow_batch_norm and (norm := self._norm_over_batch()):
            return (
                f"{norm} normalizes with the statistics of its batch, and those of a part differ; "
                "allow_batch_norm=True accepts that"
            )
        try:
            split_batch(step.batch, 2, self._split)
        except CannotSplitError as error:
            return str(error)
        return ""

    def _noted_buffers(self, step: BatchStep) -> StepBuffers | None:
        """Note or copy the buffers; None where the step would not be run again."""
        normalizes = self._norm_over_batch() is not None
        if normalizes and step.backward is not None and not self._allow_batch_norm:
            return None
        buffers = self._buffers[step.backward is None]
        buffers.start(uncounted=normalizes)
        return buffers

    def _norm_over_batch(self) -> str | None:
        """Return the name of the first module that normalizes with statistics of the batch now."""
        for name, module in self._norms:
            if module.training and (isinstance(module, AnyBatchNorm) or module.track_running_stats):
                return str(name)
        return None

    def _next(self, step: BatchStep, n_parts: int) -> int | None:
        n_samples = n_samples_in(step.batch)
        largest = self._max_splits if n_samples is None else min(self._max_splits, n_samples)
        return min(2 * n_parts, largest) if n_parts < largest else None

    def _too_small(self, step: BatchStep) -> str:
        n_samples = n_samples_in(step.batch)
        if n_samples is not None and n_samples <= self._max_splits:
            return f"each of its {n_samples} samples alone is too large; skip_batch=True skips such a batch"
        return f"max_splits={self._max_splits} parts are too large still; a larger max_splits allows smaller ones"

    def _skip(self, step: BatchStep, before: StepStart, exchange: GradientExchange, text: str) -> Any:
        before.zero_once()
        exchange.rejoin()
        self.recoveries.n_skipped += 1
        self.recoveries.latest = f"A batch was skipped: even its smallest parts ran out of memory. ({text})"
        assert step.skipped is not None
        return step.skipped()

    def _note_success(self, step: BatchStep, known: _KnownSize | None, n_parts: int, *, is_recovering: bool) -> None:
        self.recoveries.n_parts = n_parts
        self.recoveries.most_parts = max(n_parts, self.recoveries.most_parts)
        if is_recovering:
            self.recoveries.n_recovered += 1
            self.recoveries.latest = (
                f"A batch of {n_samples_in(step.batch)} samples ran out of memory and was run again in {n_parts} parts."
                + (f" Its loss is taken for a {self._loss} over samples." if step.backward is not None else "")
            )
        elif known is not None and n_parts < known.n_parts:
            known.n_parts, known.n_until_fewer = n_parts, known.patience
            sizes = self._known[step.backward is None]
            sizes[:] = [one for one in sizes if one.n_parts > 1]

    def _known_size(self, step: BatchStep) -> _KnownSize | None:
        sizes = self._known[step.backward is None]
        if not sizes:
            return None
        n_elements = _n_elements(step)
        fitting = [one for one in sizes if one.n_elements <= n_elements]
        return max(fitting, key=lambda one: one.n_parts, default=None)

    def _remember(self, step: BatchStep, known: _KnownSize | None, n_parts: int) -> _KnownSize:
        n_elements = _n_elements(step)
        if known is None or known.n_elements < n_elements:
            known = _KnownSize(n_elements, n_parts)
            self._known[step.backward is None].append(known)
        known.n_parts, known.n_until_fewer = n_parts, known.patience
        return known

    def _parts_to_try(self, known: _KnownSize | None) -> int:
        if known is None:
            return 1
        known.n_until_fewer -= 1
        if known.n_until_fewer > 0:
            return known.n_parts
        known.patience *= 2
        known.n_until_fewer = known.patience  # batches of other sizes may share this entry
        return max(1, known.n_parts // 2)

    def _prove_loss(self, step: BatchStep, n_parts: int, before: StepStart) -> str:
        """Find out whether the loss is a mean or a sum over samples: losses of two parts against that of both together.

        The host waits for the three values, once in a run. Returns the reason why it is neither, else "".
        """
        n_samples = n_samples_in(step.batch)
        if step.backward is None or self._loss != "auto" or n_samples is None:
            return ""
        try:
            pair, _ = split_batch(step.batch, max(1, min(n_parts, n_samples // 2)), self._split)[0]
            halves = split_batch(pair, 2, self._split)
            with torch.no_grad(), _without_randomness(self._model), no_collectives():
                one, other, whole = (
                    float(step.forward(part).closure_loss) for part in (halves[0][0], halves[1][0], pair)
                )
        except Exception as error:  # whatever the step raises on a part
            if is_out_of_memory(error):  # as the parts themselves would
                raise
            return f"a trial with a part of it raised {type(error).__name__}: {error}"
        finally:
            before.take_back()
        dtype = next((p.dtype for p in self._model.parameters()), torch.float32)
        tolerance = _COARSE_TOLERANCE if torch.is_autocast_enabled(self._device.type) else _tolerance_of(dtype)
        counts = halves[0][1], halves[1][1]
        mean = (one * counts[0] + other * counts[1]) / sum(counts)
        for kind, value in (("mean", mean), ("sum", one + other)):
            if abs(whole - value) <= tolerance * (abs(one) + abs(other)):
                self._loss = kind  # type: ignore[assignment]  # mypy: a literal of the tuple
                return ""
        return (
            f"the losses of {counts[0]} and {counts[1]} samples are {one:.6g} and {other:.6g}, and that of both "
            f"together is {whole:.6g}, neither their mean nor their sum. A loss over pairs of samples cannot be split; "
            'for any other give loss="mean" or loss="sum".'
        )


@contextmanager
def _without_randomness(model: nn.Module) -> Iterator[None]:
    changed = [m for m in model.modules() if m.training and isinstance(m, (AnyDropout, StatisticsNorm))]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


def _tolerance_of(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, _COARSE_TOLERANCE)


def _n_elements(step: BatchStep) -> int:
    return sum(tensor.numel() for tensor in tensors_in(step.batch))
