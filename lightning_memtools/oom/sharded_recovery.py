"""Runs steps of a model that `fully_shard` spreads over the ranks again, all ranks together.

Under FSDP 2, each layer gathers its weights from all ranks and sends its gradients to them. These collectives follow
from the model, not from the size of the batch. So a rank that runs out of memory runs a stand-in of its step, on one
small sample, which leaves out the collectives that it took part in already and takes part in the others; where it sends
gradients, they are 0. No rank waits for one that has failed. At the end of the step the ranks tell each other whether
one failed. If so, all take the step back, which is wrong on each, and run their batches in parts, equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_memtools._torch import ShardedStep
from lightning_memtools.memory.error_frames import forget_frames
from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.oom.batch_parts import CannotSplitError, n_samples_in, split_batch
from lightning_memtools.oom.collective_tally import Collective, CollectivesDifferError, CollectiveTally, left_out
from lightning_memtools.oom.gradient_exchange import ONE_RANK
from lightning_memtools.oom.release_failed_step import release_cached
from lightning_memtools.oom.step_recovery import StepRecovery
from lightning_memtools.oom.step_start import BatchStep, StepStart
from lightning_memtools.reporting.ranks import EXCHANGE_LIMIT, RankGather

_MOST_KINDS = 8


class ShardedStepRecovery(StepRecovery):
    """Runs steps whose collectives all ranks take part in, whichever of them runs out of memory.

    Gradients of each part are reduced to shards at once, and added up there. Those that earlier batches of an
    accumulation left are copied in every step, because a failed step adds to them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sharded = ShardedStep(self.model)
        # Without a time limit of its own: a rank whose data are slow has not failed.
        self._each_step = RankGather()
        is_pretended = self._each_step.world_size > 1 and distributed.get_backend() == "fake"  # those of a dry run
        self._after_failure_of_one = RankGather(None if is_pretended else EXCHANGE_LIMIT)
        self._has_failed = False
        # Of each kind of batches: the elements of a sample, and the sample.
        self._small: dict[Hashable, tuple[float, Any]] = {}
        # The collectives of training and of evaluation.
        self._usual: dict[bool, set[Collective]] = {True: set(), False: set()}

    def close(self) -> None:
        """End the exchanges with the other ranks."""
        self._each_step.close()
        self._after_failure_of_one.close()

    def run(self, step: BatchStep) -> Any:
        """Run a step and return its result, or that of its parts together.

        Raises:
            torch.OutOfMemoryError: On all ranks: one of them cannot run it in parts, or not in small enough ones.
            ValueError: Gradients are to be kept whole, where a failed step cannot be taken back.
        """
        self._sharded.note_beginning()
        if step.backward is not None and self._sharded.keeps_whole_gradients:
            raise ValueError(
                "OOMRecovery cannot take back a step after set_requires_gradient_sync(False): gradients of earlier "
                "batches are then added up in whole parameters, which a failed step adds to. Next: leave it out, so "
                "that each batch's gradients are reduced to shards."
            )
        if step.backward is None and self._sharded.is_gathered:
            return self._run_alone(step)
        sizes = self.sizes[step.backward is None]
        known = sizes.of(step.batch)
        n_parts = mine = 1  # all ranks begin with one part, until one has failed
        if self._has_failed:
            mine = sizes.parts_to_try(known)
            n_parts = self._each_step.largest(mine)
            sizes.note_agreed(known, mine, n_parts)
        before = StepStart(step, self.parameters, self.metrics, self.noted_buffers(step), self.random())
        self.look_at_first(step)
        is_recovering = False
        while True:
            result, failure, why_not = self._attempt_together(step, n_parts, before)
            if not self._each_step.largest(int(bool(failure))):
                break
            self._has_failed = True
            self._sharded.reset()
            self._sharded.note_beginning()
            result = None  # of a rank that did not fail: its memory is needed
            why_not = before.take_back() or why_not or self.why_not(step)
            release_cached(self.device)
            more, failure = self._agree(step, n_parts, failure, why_not)
            if more is None:
                return self.skip(step, before, ONE_RANK, failure)
            if failure:
                known, is_recovering = sizes.remember(step.batch, known, more), True
            n_parts = more
        before.add_gradients_set_aside()
        self._note_small(step)
        sizes.note_success(known, n_parts)
        self.end(step, n_parts, ONE_RANK, is_recovering=is_recovering)
        return result

    def _run_alone(self, step: BatchStep) -> Any:
        """Run a batch that needs no other rank; ranks may have unequal numbers of these, so that none may wait."""

        def forward(part: Any) -> Any:
            try:
                return step.forward(part)
            except Exception:
                self._sharded.end_forward()
                raise

        return self.run_on_this_rank(replace(step, forward=forward), ONE_RANK)

    def _attempt_together(self, step: BatchStep, n_parts: int, before: StepStart) -> tuple[Any, str, str]:
        """Take part in all collectives of an attempt, whatever fails.

        Returns the result; the error's first line, or ""; and the reason why the step must not be run again, or "".
        """
        if n_parts == 1:  # hooks see accumulated gradients as ever
            before.copy_gradients()
        else:
            before.set_gradients_aside()
        tally, why_not = CollectiveTally(), ""
        try:
            with tally.counted():
                if n_parts == 1:
                    result = before.run_part(step, step.batch, 1.0)
                    self._usual[step.backward is None].update(tally.done)
                    return result, "", ""
                return self._run_equally_many(step, n_parts, before), "", ""
        except CannotSplitError as error:
            failure, why_not = "Out of memory: a batch of this size did not fit on every rank.", str(error)
            forget_frames(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if tally.unclear:
                error.add_note(
                    f"OOMRecovery did not run this step again: memory ran out inside the collective {tally.unclear}, "
                    "so that the other ranks may have begun it or not."
                )
                raise
            failure = str(error).partition("\n")[0]
            forget_frames(error)
        self._sharded.reset()
        why_not = why_not or before.take_back()
        release_cached(self.device)
        before.set_gradients_aside()
        self._stand_in(step, n_parts, before, tally, failure)
        return None, failure, why_not

    def _run_equally_many(self, step: BatchStep, n_parts: int, before: StepStart) -> Any:
        """Run the batch in so many parts; where it has fewer samples, some of them again, with a weight of 0."""
        parts = self.parts(step, min(n_parts, n_samples_in(step.batch) or n_parts))
        if len(parts) > n_parts:
            raise CannotSplitError(f"split_batch returned {len(parts)} parts where {n_parts} were asked for")
        for _ in range(n_parts - len(parts)):
            before.run_part(step, parts[0][0], 0.0)
        if len(parts) < n_parts and (reason := before.take_back_all_but_gradients()):
            raise CannotSplitError(reason)
        return self.run_parts(step, parts, before, ONE_RANK)

    def _stand_in(self, step: BatchStep, n_parts: int, before: StepStart, tally: CollectiveTally, text: str) -> None:
        """Take part in the collectives that are left of an attempt that failed."""
        small = self._small.get(_kind_of(step))
        n_samples = 2 if self.norm_over_batch() else 1  # batch norm has no statistics of a single sample
        part = _few_samples(step.batch, n_samples, self.split) if small is None else small[1]
        if step.backward is not None:
            step = replace(step, backward=partial(_backward_of_finite, step.backward))
        with left_out():
            self._sharded.gather_as_at_beginning()
        try:
            with torch.autograd.set_detect_anomaly(False), tally.continued(self._usual[step.backward is None]):
                for _ in range(n_parts):
                    before.run_part(step, part, 1.0)
        except CollectivesDifferError as error:
            raise torch.OutOfMemoryError(
                f"{text}\nOOMRecovery did not run this step again: with other samples the step starts other "
                f"collectives ({error}), so that the ranks cannot go on together."
            ) from None
        except Exception as error:
            error.add_note(
                f'OOMRecovery did not run this step again: after "{text}" one sample was to take part in the '
                "collectives that were left of the step, and that failed too."
            )
            raise

    def _note_small(self, step: BatchStep) -> None:
        """Keep a copy of the smallest sample that fitted: one of a batch that does not fit may be too large itself."""
        n_samples = n_samples_in(step.batch)
        if not n_samples:
            return
        n_each = sum(tensor.numel() for tensor in tensors_in(step.batch)) / n_samples
        kind = _kind_of(step)
        if len(self._small) < _MOST_KINDS if kind not in self._small else n_each < self._small[kind][0]:
            few = _few_samples(step.batch, 2, self.split)  # some models do not work with a single sample
            self._small[kind] = n_each, map_tensors(few, torch.clone)

    def _agree(self, step: BatchStep, n_parts: int, failure: str, why_not: str) -> tuple[int | None, str]:
        """Return how many parts all ranks try next, None to skip the batch; and this rank's failure.

        Raises:
            torch.OutOfMemoryError: A rank must not run its step again, or has not answered.
        """
        is_skipped = False
        if failure and not why_not and self.next(step, n_parts) is None:
            is_skipped = self.skip_batch and step.skipped is not None
            why_not = "" if is_skipped else self.too_small(step)
        gather = self._after_failure_of_one
        told = gather.objects((gather.rank, failure, why_not, is_skipped))
        reasons = [f"on rank {rank}, {reason}" for rank, _, reason, _ in told if reason]
        if missing := gather.world_size - len(told):
            reasons.append(f"{missing} of {gather.world_size} ranks did not answer within {EXCHANGE_LIMIT.seconds} s")
        text = failure or next((f"Rank {rank}: {theirs}" for rank, theirs, *_ in told if theirs), "Out of memory.")
        if reasons:
            raise torch.OutOfMemoryError(f"{text}\nOOMRecovery did not run this step in parts: {'; '.join(reasons)}.")
        if any(skips for *_, skips in told):
            return None, text
        return min(2 * n_parts, self.max_splits), failure


def _backward_of_finite(backward: Callable[[Tensor], None], loss: Tensor) -> None:
    """Send a stand-in's loss backward, which callbacks look at too, and which has no meaning."""
    backward(torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0))


def _kind_of(step: BatchStep) -> Hashable:
    """Return what batches of a kind share: a step may treat others differently, those of another loader for one."""
    names = tuple(step.batch) if isinstance(step.batch, Mapping) else ()
    tensors = tuple((tensor.dtype, tensor.ndim) for tensor in tensors_in(step.batch))
    return step.backward is None, type(step.batch), names, tensors


def _few_samples(batch: Any, n: int, split: Any) -> Any:
    """Return the first samples of a batch; the whole where it cannot be cut."""
    with suppress(CannotSplitError):
        return split_batch(batch, max(1, (n_samples_in(batch) or 8) // n), split)[0][0]
    return batch
