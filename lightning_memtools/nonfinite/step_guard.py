"""Checks each step between backward and update: lets good steps pass, holds bad ones back, and can undo them."""

from __future__ import annotations

import math
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, distributed
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memtools._torch import takes_scaled_gradients
from lightning_memtools.memory.arriving_values import ArrivingValues
from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.memory.nested_tensors import bytes_in, names_of
from lightning_memtools.memory.sizes import is_count, parse_size
from lightning_memtools.nonfinite.bad_step import (
    BadStep,
    GuardedStep,
    MicroBatch,
    PastStep,
    depends_on_weights,
    move_to_host,
    release_batches,
    undivided_loss,
)
from lightning_memtools.nonfinite.finite_checks import (
    BadTensor,
    count_bad,
    find_bad,
    gradients_of,
    measure,
    measure_and_read,
)
from lightning_memtools.nonfinite.update_veto import (
    UpdateVeto,
    WeightBounds,
    bad_setting,
    hide_gradients,
    honours_found_inf,
    over_ranks,
    poison,
    why_update_is_bad,
)
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.reporting.strategies import strategy_family, why_unsupported
from lightning_memtools.state.buffer_keeper import BufferKeeper
from lightning_memtools.state.starts import BatchStart, BatchStartRecorder, UpdateStart, restore_frozen

Gradients = Literal["whole", "replicated", "sharded"]

# Of what parameters, gradients and an Adam optimizer take together (4 times the parameters), the share that older
# batches of an accumulation may hold: half of the 0.5% that all callbacks together may add to the peak.
BATCH_SHARE = 0.0025

# Of an optimizer that evaluates the loss several times in a step, as LBFGS does.
_MOVED_WITHIN = "the weights and the optimizer state that earlier evaluations of the loss within this step have moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltOptions:
    """The arguments of HaltOnNaN, which says what each means.

    Raises:
        ValueError: One of them is none of its values.
    """

    max_skips: int = 0
    amp_patience: int = 20
    check_outputs: bool | Literal["losses"] = "losses"
    save_last_good: bool = True
    explain: bool = True
    capsule: bool = True
    max_bytes: str = "2GiB"
    directory: str | None = None
    undo_updates: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.max_skips, least=0):
            raise ValueError(
                f"max_skips={self.max_skips!r} is not a number of steps. Use 0 to halt at the first bad step."
            )
        if not is_count(self.amp_patience):
            raise ValueError(
                f"amp_patience={self.amp_patience!r} is not a number of steps. Use 1 to halt at the first skip."
            )
        if self.check_outputs not in {True, False, "losses"}:
            raise ValueError(f'check_outputs={self.check_outputs!r} is none of True, False and "losses".')
        parse_size(self.max_bytes)

    @property
    def reruns(self) -> bool:
        """True if a bad step is run again, or kept to be run again."""
        return self.explain or self.capsule


class ReadingWatch(Protocol):
    """Sees the losses and the gradients' norm of each finite step that a StepGuard has read.

    Attributes:
        decides: True if it may hold updates back. Then each step is read before its update, for which the host waits.
    """

    decides: bool

    def read(self, guard: StepGuard, step: GuardedStep, loss: float, norm: float, *, is_late: bool) -> bool:
        """Return whether the step's update is to be held back.

        Args:
            guard: The guard that has read it.
            step: The step.
            loss: The mean of its losses, the largest of all ranks; NaN if it had none.
            norm: The norm over all its gradients.
            is_late: True if its update was made before its values were read, so that nothing can be held back.
        """


class StepGuard:
    """Checks every optimizer step between backward and update.

    With fused optimizers the update is held back on the device and the result is read one step late, without waiting.
    With all others one small vector is read per step.

    Call `begin` before a batch's forward pass, `loss` before its backward pass, `check` when backward is done, and
    `before_update` last. If one of them or `drain` returns a step, it is bad: call `undo` to restore what it has
    changed, then stop.

    Args:
        model: The module that is trained.
        options: The arguments of HaltOnNaN.
        gradients: How a rank's gradients relate to those of the others: there is one rank (whole), all have the same
            after backward (replicated), each has a part (sharded).
        ranks: Gathers from all ranks.
        mark_loop: Called at the start of each step; returns a function that puts the caller's counters back to there,
            which `undo` calls.
        checks_again: Whether code of the user runs between `check` and the update, so that it is checked once more.
        wraps_updates: Whether code of the user runs around the optimizer's step, so that all updates are read.
        watch: Sees what was read of each finite step.

    Attributes:
        history: The last 20 steps, oldest first.
        skipped: (step, batch indices) of the bad steps that were skipped so far.
        saw_losses: Whether there was any loss that depends on weights.
        bad_before: The names of weights that were NaN or Inf before training.
        saw_gradients: Whether there was any gradient: gradients that are not in p.grad cannot be checked.
    """

    def __init__(
        self,
        model: Module,
        options: HaltOptions = HaltOptions(),
        *,
        gradients: Gradients = "whole",
        ranks: RankGather | None = None,
        mark_loop: Callable[[], Callable[[], None]] = lambda: _nothing,
        checks_again: bool = False,
        wraps_updates: bool = False,
        watch: ReadingWatch | None = None,
    ) -> None:
        self.history: deque[PastStep] = deque(maxlen=20)
        self.skipped: list[tuple[int, tuple[int, ...]]] = []
        self.saw_losses = False
        self.saw_gradients = False
        self._model = model
        self._watch = watch
        self._max_skips, self._amp_patience = options.max_skips, options.amp_patience
        self._gradients = gradients
        self._ranks = ranks or RankGather()
        self._mark_loop = mark_loop
        self._start: Callable[[Any], Any] = BatchStartRecorder(model).record if options.reruns else lambda _batch: None
        self._move = move_to_host if options.reruns else None
        n_bytes = bytes_in([p for p in model.parameters() if not is_lazy(p)])
        self._budget_bytes = int(4 * BATCH_SHARE * n_bytes)
        self._buffers = BufferKeeper(model, all_state=gradients != "sharded")
        self._veto: UpdateVeto[GuardedStep] | None = None
        self._is_fused: dict[Optimizer, bool] = {}
        self._starts: dict[Optimizer, UpdateStart] = {}
        self._scaler_skips: Counter[Optimizer] = Counter()
        self._step: GuardedStep | None = None
        self._latest: GuardedStep | None = None
        self._now: tuple[int, MicroBatch] | None = None
        self._n_steps_in_batch = 0
        self._is_first_warning = FirstTime()
        self._held_back: Optimizer | None = None
        self._checks_again = checks_again
        self._undo_updates = options.undo_updates
        self._reads_all_updates = checks_again or wraps_updates or options.undo_updates
        self.bad_before: frozenset[str] = frozenset()
        self._updated: GuardedStep | None = None
        self._weights: ArrivingValues[GuardedStep] = ArrivingValues()
        self._checked: GuardedStep | None = None
        self._bounds = WeightBounds()

    @property
    def carries_losses(self) -> bool:
        """True if NaN gradients tell the other ranks of a bad loss."""
        return self._gradients == "replicated"

    @property
    def is_sharded(self) -> bool:
        """True if no rank has all weights and gradients."""
        return self._gradients == "sharded"

    def begin(self, batch: Any, batch_idx: int, number: int, *, first: bool = True) -> None:
        """Note a batch before its forward pass. `first`: it is the first micro-batch of training step `number`."""
        micro = MicroBatch(batch_idx, batch, start=self._start(batch))
        self._now = number, micro
        self._n_steps_in_batch = 0
        if first or self._step is None or not self._step.losses():
            self._open()
        else:
            self._step.micro.append(micro)
        self._release_old_batches()

    def end_batch(self) -> None:
        """Note that the batch is over, so that it is held only as long as its step needs it."""
        self._now = None

    def check_updates(self) -> BadStep | None:
        """Return the step whose update made weights NaN or Inf; None if none is known yet. Never waits for the device.

        Call it after a batch, and before a checkpoint or evaluation. One pass over the weights that were updated; on
        the CPU once in 50 steps, as long as the update is sure to leave them finite.
        """
        self._read_updated_weights()
        for (norm, *_), updated in self._weights.receive() if self._weights else ():
            if math.isfinite(norm) or updated.optimizer is None:
                continue
            if (earlier := self.drain()) is not None:
                return earlier  # the step was bad itself, and the flag on the device held its update back
            why = why_update_is_bad(self._model, updated.number, updated.optimizer, updated.parameters, self.bad_before)
            if why and (len(self.skipped) >= self._max_skips or updated.copies is None):
                last = self.history[-1].norm if self.history else math.nan
                losses = tuple(float(loss) for loss in updated.losses())
                return BadStep(updated, losses, last, (), late=False, update=why, applied=True)
            if why and updated.copies is not None:
                updated.copies.undo()
                self._buffers.restore()
                self._note_skip(updated)
        return None

    def _read_updated_weights(self) -> None:
        step, self._updated = self._updated, None
        if step is None or step.optimizer is None:
            return
        if step.parameters[0].device.type == "cpu":
            with torch.no_grad():
                norm, *_ = measure_and_read(step.parameters, []) or [0.0]
            self._bounds.read(step.optimizer, norm, step.parameters)
            if not math.isfinite(norm):
                self._weights.send([norm], step)
        elif (numbers := measure(step.parameters, [])) is not None:
            # The answer comes one step later; by then the batch is gone.
            without = [replace(micro, batch=None) for micro in step.micro]
            self._weights.send(numbers, replace(step, micro=without))

    def loss(self, loss: Tensor, *, divided_by: int = 1, scaler: Any = None) -> None:
        """Note a loss before its backward pass. It was divided for an accumulation and multiplied by the scaler."""
        step = self._step
        if step is None:
            step = self._open()
            if self._now is not None:
                step.written = (_MOVED_WITHIN,)
        step.restore_loop = step.restore_loop or self._mark_loop()
        scale = None if scaler is None else scaler.scale(torch.ones((), device=loss.device))
        value = undivided_loss(loss, divided_by, scale)
        step.micro[-1].losses.append(value)
        self.saw_losses = self.saw_losses or depends_on_weights(loss)
        if self.carries_losses:
            poison(loss)

    def check(self, optimizer: Optimizer, *, scaler: Any = None, reopen: bool = False) -> BadStep | None:
        """Decide on the coming update. `reopen`: more forward passes may follow in the same batch."""
        step, self._step = self._step or self._open(), None
        step.restore_loop = step.restore_loop or self._mark_loop()
        step.optimizer = optimizer
        step.parameters, gradients = gradients_of(optimizer)
        step.written += self._buffers.note_writes(step.parameters, goes_on=reopen)
        self.saw_gradients = self.saw_gradients or bool(gradients)
        if (bad_update := self.check_updates()) is not None:  # of an earlier update in this batch
            return bad_update
        if self._watch is not None and self._ranks.world_size > 1:
            step.shared_loss = largest_mean_loss(step.losses(), self._model)
        decides = self._watch is not None and self._watch.decides
        if scaler is None and self._gradients != "sharded" and not decides and self._honours(optimizer):
            bad_step = self._check_on_device(step, optimizer, gradients)
        else:
            bad_step = self.drain() or self._check_on_host(step, optimizer, gradients, scaler)
        # What a gradient scaler skips is not made, whatever its gradients are.
        self._checked = None if scaler is not None and self._scaler_skips[optimizer] else step
        if bad_step is None and reopen:
            self._n_steps_in_batch += 1
            self._open(of_batch=False).restore_loop = None  # to be set when the update has been made
        return bad_step

    def before_update(self, optimizer: Optimizer) -> BadStep | None:
        """Hold the update back if its step is to be skipped, or if hooks or settings would make it NaN or Inf.

        Call it last, after clipping (which needs gradients) and all hooks. `checks_again` costs a second pass over the
        gradients, for which the host waits.
        """
        is_held_back, self._held_back = self._held_back is optimizer, None
        if is_held_back:
            hide_gradients(optimizer)
        step, self._checked = self._checked, None
        if is_held_back or step is None:
            return None
        why = bad_setting(optimizer)
        if not why and self._checks_again and self._gradients != "sharded":
            parameters, gradients = gradients_of(optimizer)
            bad = find_bad(zip(names_of(self._model, parameters), gradients, strict=True))
            why = f"clipping or a hook then made the gradient of {bad[0]} NaN or Inf" if bad else ""
        if not why:
            self._await_update(step, optimizer)
            return None
        if (earlier := self.drain()) is not None:
            return earlier
        if self._checked_is_bad(step):
            return None  # the step itself was bad, and the flag on the device holds it back
        if len(self.skipped) < self._max_skips:
            hide_gradients(optimizer)
            self._buffers.restore()
            self._note_skip(step)
            return None
        losses = tuple(float(loss) for loss in step.losses())
        return BadStep(step, losses, self.history[-1].norm if self.history else math.nan, (), late=False, update=why)

    def _await_update(self, step: GuardedStep, optimizer: Optimizer) -> None:
        """Note that the updated weights are to be looked at, unless the update is sure to leave them finite."""
        # Where hooks may change the gradients, or on a GPU, the norm of those that it takes is not known. An own
        # `optimizer_step` may write the weights itself.
        is_known = self.history and step.parameters and not self._reads_all_updates
        if is_known and step.parameters[0].is_cpu and self._bounds.hold(optimizer, self.history[-1].norm):
            return
        if self._gradients != "sharded" and set(map(type, step.parameters)) == {Parameter}:
            self._updated = step
            if self._undo_updates:
                step.copies = UpdateStart(optimizer, copy=Tensor.clone)

    def _checked_is_bad(self, step: GuardedStep) -> bool:
        return bool(self.skipped) and self.skipped[-1] == (step.number, tuple(micro.index for micro in step.micro))

    def drain(self) -> BadStep | None:
        """Wait for the results of all steps that are not decided yet; return the bad step, if there is one."""
        return self._read(wait=True)

    def undo(self, bad_step: BadStep) -> tuple[str, ...]:
        """Restore buffers, optimizer state and the caller's counters; return the names of what it could not."""
        if bad_step.applied and bad_step.step.copies is not None:
            bad_step.step.copies.undo()
        undone: set[Optimizer] = set()
        for step in (bad_step.step, *bad_step.later):
            if step.start is not None and step.optimizer is not None and step.optimizer not in undone:
                step.start.remove_new_state()
                step.start.restore_settings()
                undone.add(step.optimizer)
        unrestored = self.restore_buffers(bad_step.step, *bad_step.later)
        if bad_step.step.restore_loop is not None:
            bad_step.step.restore_loop()
        start = bad_step.step.micro[0].start if bad_step.step.micro else None
        if isinstance(start, BatchStart):
            restore_frozen(self._model, start.frozen)
        return unrestored

    def restore_buffers(self, *steps: GuardedStep) -> tuple[str, ...]:
        """Restore what forward passes of the present step have written; return the names of what it could not.

        Args:
            steps: The present step, and later ones.
        """
        written = [name for step in steps for name in step.written]
        unrestored = tuple(dict.fromkeys([*self._buffers.unrestored(), *written]))
        self._buffers.restore()
        return unrestored

    def written_and_restored(self) -> list[str]:
        """Return the names of the parameters and attributes that forward passes write and that `undo` restores."""
        return self._buffers.known()

    def close(self) -> None:
        """Stop vetoing updates of the optimizers, and release all tensors. Idempotent."""
        if self._veto is not None:
            self._veto.close()
        self._step = self._latest = self._now = self._updated = None
        self._weights.clear()
        self._is_fused.clear()
        self._starts.clear()
        self._scaler_skips.clear()
        self._bounds = WeightBounds()

    def _open(self, *, of_batch: bool = True) -> GuardedStep:
        number, micro = self._now or (0, MicroBatch(0, None))
        if micro.losses or self._n_steps_in_batch:  # a second step within the batch has losses of its own
            micro = MicroBatch(
                micro.index,
                micro.batch,
                start=micro.start,
                steps_before=self._n_steps_in_batch,
                resumed=self._start(micro.batch),
            )
        step = self._step = self._latest = GuardedStep(number, self._mark_loop(), [micro])
        flag = None if self._veto is None else self._veto.flag
        if flag is not None and self._max_skips:
            self._buffers.restore(where=flag)
        self._buffers.keep(unless=flag, of_batch=of_batch)
        return step

    def _release_old_batches(self) -> None:
        pending = self._veto.notes() if self._veto is not None else ()
        if not pending and self._step is not None and len(self._step.micro) == 1:
            return
        steps = [*pending, *([self._step] if self._step else [])]
        held = [micro for step in reversed(steps) for micro in reversed(step.micro)]
        for micro in held[2:]:  # the present one and one more are always held
            micro.keep_if_bad()
        if len(held) > 2:  # noqa: PLR2004
            release_batches(held, self._budget_bytes, self._move)

    def _honours(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._is_fused:
            self._is_fused[optimizer] = honours_found_inf(optimizer)
        return self._is_fused[optimizer]

    def _check_on_device(self, step: GuardedStep, optimizer: Optimizer, gradients: list[Tensor]) -> BadStep | None:
        losses = step.measured()
        # Under data parallelism a rank's own loss must not decide: the others do not know it. `poison` tells them.
        n_deciding = 1 if self._gradients == "replicated" else 1 + len(losses)
        if can_look_first(gradients):
            if (earlier := self._read(wait=True)) is not None:
                return earlier
            values = measure_and_read(gradients, losses) or []
            if all(map(math.isfinite, values[:n_deciding])) and (self._veto is None or not self._veto.flag):
                # An optimizer that sees a flag takes longer, though it is 0.
                self._note_good(step, optimizer, values[1 : 1 + len(losses)], values[0])
                return None
        before = self._starts.get(optimizer)
        created = before is not None and before.has_other_keys()
        # Ranks must not differ in when they read. And state that a first step created without filling it must be
        # removed before the next step uses it: that waits once.
        bad_step = self._read(wait=created or self._ranks.world_size > 1)
        if bad_step is not None:
            return bad_step
        step.start = self._starts[optimizer] = UpdateStart(optimizer, None if created else before)
        numbers = measure(gradients, losses, exact=True)
        if numbers is None:
            return None
        self._veto = self._veto or UpdateVeto(numbers.device, self._max_skips)
        self._veto.check(optimizer, numbers.to(self._veto.flag.device, non_blocking=True), n_deciding, step)
        return None

    def _read(self, *, wait: bool) -> BadStep | None:
        if self._veto is None:
            return None
        readings = self._veto.read(wait=wait)
        for position, reading in enumerate(readings, start=1):
            step, n_losses = reading.note, len(reading.note.measured())
            losses, norms = reading.numbers[1 : 1 + n_losses], reading.numbers[1 + n_losses :]
            if not reading.halts and not reading.bad:
                self._note_good(step, None, losses, reading.numbers[0])
                continue
            losses = losses[: len(step.losses())]
            self._remember(step, losses, reading.numbers[0])
            if reading.halts:
                # By now the gradients may be clipped, or those of the next step: their norms are all that is known.
                named = zip(names_of(self._model, step.parameters), step.parameters, norms, strict=True)
                bad = [BadTensor(name, None, None, p.numel(), n) for name, p, n in named if not math.isfinite(n)]
                later = tuple(each.note for each in (*readings[position:], *self._veto.read(wait=True)))
                return BadStep(step, tuple(losses), reading.numbers[0], tuple(bad), late=True, later=later)
            assert step.start is not None
            step.start.remove_new_state()
            if step is self._latest:  # else the next step began by putting them back, on the device
                self._buffers.restore()
            self._note_skip(step)
        return None

    def _note_good(
        self, step: GuardedStep, optimizer: Optimizer | None, measured: list[float], norm: float, scaler: Any = None
    ) -> None:
        """Note a step that is finite, and hold its update back if the watch says so; no optimizer: it has been made."""
        losses = measured[: len(step.losses())]
        self._remember(step, losses, norm)
        if not all(map(math.isfinite, losses)):
            self._warn_of_private_loss()
        if self._watch is None:
            return
        loss = measured[-1] if step.shared_loss is not None and losses else self.history[-1].loss
        if self._watch.read(self, step, loss, norm, is_late=optimizer is None) and optimizer is not None:
            self._hold_back(optimizer, scaler)

    def _check_on_host(
        self, step: GuardedStep, optimizer: Optimizer, gradients: list[Tensor], scaler: Any
    ) -> BadStep | None:
        losses = step.measured()
        n_losses = len(losses)
        scales = []
        if scaler is not None and takes_scaled_gradients(optimizer) and gradients:
            # These optimizers get their gradients still scaled. get_scale() would wait for the device once more.
            scales.append(scaler.scale(torch.ones((), device=gradients[0].device)))
        values: list[float] | None
        if self._gradients == "sharded":
            device = next(self._model.parameters()).device
            values = over_ranks(measure(gradients, [*losses, *scales]), 1 + n_losses, device).tolist()
        else:
            values = measure_and_read(gradients, [*losses, *scales])
        if values is None:
            return None
        norm, loss_values = values[0], values[1 : 1 + n_losses]
        for scale in values[1 + n_losses : 1 + n_losses + len(scales)]:
            norm = norm / scale if scale else math.nan
        norms = values[1 + n_losses + len(scales) :]
        if self._gradients == "sharded":
            is_suspect = not math.isfinite(norms.pop())
        else:
            is_suspect = not all(map(math.isfinite, values[:1] if self._gradients == "replicated" else values))
        if not is_suspect:
            self._scaler_skips.pop(optimizer, None)
            self._note_good(step, optimizer, loss_values, norm, scaler)
            return None
        loss_values = loss_values[: len(step.losses())]
        self._remember(step, loss_values, norm)
        bad_loss = not all(map(math.isfinite, loss_values))
        named = zip(names_of(self._model, step.parameters), gradients, norms, strict=True)
        bad_step = BadStep(step, tuple(loss_values), norm, tuple(count_bad(list(named))), late=False)
        return self._judge(bad_step, optimizer, scaler, bad_loss=bad_loss)

    def _judge(self, bad_step: BadStep, optimizer: Optimizer, scaler: Any, *, bad_loss: bool) -> BadStep | None:
        """Decide on a suspect step: let it pass, leave it to the gradient scaler, skip it, or return it."""
        bad_gradient = bool(bad_step.gradients)
        if self._ranks.world_size > 1 and (self._gradients == "sharded" or scaler is not None):
            everyone = self._ranks.objects((bad_loss, bad_gradient))
            bad_loss, bad_gradient = any(loss for loss, _ in everyone), any(gradient for _, gradient in everyone)
        if not bad_loss and not bad_gradient:
            self._scaler_skips.pop(optimizer, None)
            return None  # the gradients are finite, and only their norm overflows
        if scaler is not None and not bad_loss:
            self._scaler_skips[optimizer] += 1
            skips, scale = self._scaler_skips[optimizer], scaler.get_scale()
            if skips < self._amp_patience and scale >= 1:
                return None
            reason = (
                f"the gradient scaler skipped {skips} step{'s' * (skips > 1)} in a row and is at a scale of {scale:g} "
                f"(HaltOnNaN allows {self._amp_patience} in a row above a scale of 1: amp_patience)"
            )
            bad_step = BadStep(
                bad_step.step, bad_step.losses, bad_step.norm, bad_step.gradients, late=False, scaler=reason
            )
        if len(self.skipped) >= self._max_skips:
            return bad_step
        self._hold_back(optimizer, scaler)
        self._note_skip(bad_step.step)
        return None

    def _hold_back(self, optimizer: Optimizer, scaler: Any) -> None:
        if scaler is None or not takes_scaled_gradients(optimizer):
            self._held_back = optimizer
        else:
            # The scaler needs gradients to look at, and skips the update itself if one is not finite.
            for gradient in gradients_of(optimizer)[1]:
                gradient.fill_(torch.inf)
        self._buffers.restore()

    def _note_skip(self, step: GuardedStep) -> None:
        self.skipped.append((step.number, tuple(micro.index for micro in step.micro)))

    def _remember(self, step: GuardedStep, losses: list[float], norm: float) -> None:
        self.history.append(PastStep(step.number, sum(losses) / len(losses) if losses else math.nan, norm))

    def _warn_of_private_loss(self) -> None:
        if self._is_first_warning():
            warnings.warn(
                f"The loss of rank {self._ranks.rank} is NaN or Inf while the gradients of all ranks are finite, so "
                "the other ranks cannot know and training goes on. This warning is given once.",
                stacklevel=2,
            )


def can_look_first(gradients: list[Tensor]) -> bool:
    """Return whether the values of gradients can be read at once, as on the CPU, so that no step is decided late."""
    return bool(gradients) and gradients[0].is_cpu


def gradients_under(strategy: type, *, world_size: int) -> Gradients:
    """Return how a rank's gradients relate to those of the other ranks under a strategy.

    Raises:
        ValueError: The gradients cannot be seen under it; the message says why.
    """
    reason = why_unsupported("HaltOnNaN", strategy)
    if reason is not None:
        raise ValueError(
            f"HaltOnNaN cannot guard a run under {strategy.__name__}: {reason} Remove HaltOnNaN, or train with a "
            "strategy that lets it see the gradients: single device, DDP, FSDP or ModelParallelStrategy."
        )
    family = strategy_family(strategy)
    if family in {"SingleDevice", "DDP"}:
        return "whole" if family == "SingleDevice" else "replicated"
    # The result of deciding together in each step is right under any strategy, also under one that is not known.
    return "sharded" if family in {"FSDP", "ModelParallel"} or world_size > 1 else "whole"


@torch.no_grad()
def largest_mean_loss(losses: list[Tensor], model: Module) -> Tensor:
    """Return the largest of all ranks' mean losses, 0-dim. Collective; does not wait for the device."""
    device = next(model.parameters()).device
    mean = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
    mean = mean.to(device, torch.float32, copy=True)
    distributed.all_reduce(mean, op=distributed.ReduceOp.MAX)
    return mean


def _nothing() -> None:
    """Do nothing."""
