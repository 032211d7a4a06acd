"""Stands between backward and update: passes good steps, holds bad ones back, and can undo what they did."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_memtools.nonfinite.bad_step import History, Past, Step, Trip, noted
from lightning_memtools.nonfinite.buffer_keeper import BufferKeeper
from lightning_memtools.nonfinite.finite_checks import GradientTraces, count_bad, gradients_of, measure, measure_exactly
from lightning_memtools.nonfinite.micro_batches import MicroBatch, let_go
from lightning_memtools.nonfinite.ranks import Ranks
from lightning_memtools.nonfinite.tensor_names import names_of
from lightning_memtools.nonfinite.update_veto import (
    StateKeys,
    Veto,
    hide_gradients,
    honours_found_inf,
    over_ranks,
    poison,
    put_settings_back,
    settings_of,
)

Gradients = Literal["whole", "replicated", "sharded"]


class Guard:
    """Checks every optimizer step between backward and update.

    With fused optimizers the update is held back on the device and the verdict is read one step late, without waiting.
    With all others one small vector is read per step.

    Call `begin` before a batch's forward pass, `loss` before its backward pass, `check` before the update. What `check`
    or `drain` returns is a step that must not be taken: `undo` puts back what it has already done, then stop.

    Args:
        model: The module that is trained.
        max_skips: How many bad steps are held back before one trips.
        amp_patience: After how many skips of the gradient scaler in a row a step trips.
        gradients: How a rank's gradients relate to those of the others: there is one rank (whole), all have the same
            after backward (replicated), each has a part (sharded).
        ranks: The other ranks.
        mark: Called at the start of each step; what it returns is kept in `Step.mark`.
        start: Called with each batch before its forward pass; what it returns is kept in `MicroBatch.start`.
        budget_bytes: What older batches of an accumulation may hold of memory.
        move: What is done with those beyond it; when left out, they are dropped.

    Attributes:
        history: The last steps.
        skipped: (step, batch indices) of the bad steps that were held back so far.
        saw_losses: Whether there was a loss at all.
        saw_gradients: Whether there was a gradient at all: gradients kept elsewhere cannot be checked.
    """

    def __init__(
        self,
        model: Module,
        *,
        max_skips: int = 0,
        amp_patience: int = 10,
        gradients: Gradients = "whole",
        ranks: Ranks | None = None,
        mark: Callable[[], object] = lambda: None,
        start: Callable[[Any], Any] = lambda _batch: None,
        budget_bytes: int = 0,
        move: Callable[[MicroBatch], object] | None = None,
    ) -> None:
        self.history = History()
        self.skipped: list[tuple[int, tuple[int, ...]]] = []
        self.saw_losses = False
        self.saw_gradients = False
        self._model = model
        self._max_skips = max_skips
        self._amp_patience = amp_patience
        self._gradients = gradients
        self._ranks = ranks or Ranks()
        self._mark = mark
        self._start = start
        self._budget_bytes = budget_bytes
        self._move = move
        self._buffers = BufferKeeper(model)
        self._veto: Veto[Step] | None = None
        self._is_fused: dict[Optimizer, bool] = {}
        self._keys: dict[Optimizer, StateKeys] = {}
        self._scaler_skips: Counter[Optimizer] = Counter()
        self._step: Step | None = None
        self._latest: Step | None = None
        self._now: tuple[int, MicroBatch] | None = None
        self._n_steps_in_batch = 0
        self._has_warned = False

    @property
    def carries_losses(self) -> bool:
        """Whether a bad loss of one rank is made known to the others as NaN gradients."""
        return self._gradients == "replicated"

    @property
    def is_sharded(self) -> bool:
        """Whether no rank has all weights and gradients."""
        return self._gradients == "sharded"

    def begin(self, batch: Any, batch_idx: int, number: int, *, first: bool = True) -> None:
        """Note a batch before its forward pass. `first`: it begins a step of training step `number`."""
        micro = MicroBatch(batch_idx, batch, start=self._start(batch))
        self._now = number, micro
        self._n_steps_in_batch = 0
        if first or self._step is None or not self._step.losses():
            self._open()
        else:
            self._step.micro.append(micro)
        self._let_go()

    def end_batch(self) -> None:
        """Hold the batch no longer than its step needs it."""
        self._now = None

    def loss(self, loss: Tensor, *, divided_by: int = 1, scaler: Any = None) -> None:
        """Note a loss before its backward pass. It was divided for an accumulation and multiplied by the scaler."""
        if self._step is None:
            self._open()
        assert self._step is not None
        if self._step.mark is None:
            self._step.mark = self._mark()
        scale = None if scaler is None else scaler.scale(torch.ones((), device=loss.device))
        value = noted(loss, divided_by, scale)
        micro = self._step.micro[-1]
        micro.losses.append(value)
        self.saw_losses = True
        if value.device.type == "cpu" and not math.isfinite(value.item()):  # on the CPU, reading waits for nothing
            micro.keep = True
        if self.carries_losses:
            poison(loss)

    def check(self, optimizer: Optimizer, *, scaler: Any = None, reopen: bool = False) -> Trip | None:
        """Decide on the coming update. `reopen`: more forward passes may follow in the same batch."""
        if self._step is None:
            self._open()
        step, self._step = self._step, None
        assert step is not None
        step.optimizer = optimizer
        if scaler is None and self._gradients != "sharded" and self._honours(optimizer):
            trip = self._check_on_device(step, optimizer)
        else:
            trip = self.drain() or self._check_on_host(step, optimizer, scaler)
        if trip is None and reopen:
            self._n_steps_in_batch += 1
            self._open()
            self._step.mark = None  # type: ignore[attr-defined]  # to be taken once the update is through
        return trip

    def drain(self) -> Trip | None:
        """Wait for all verdicts that are still out. Does nothing where none is."""
        return self._read(wait=True)

    def undo(self, trip: Trip) -> tuple[str, ...]:
        """Put buffers and optimizer state back to the start of the bad step; what could not be put back is named."""
        undone: set[Optimizer] = set()
        for step in (trip.step, *trip.later):
            if step.keys is not None and step.optimizer is not None and step.optimizer not in undone:
                step.keys.put_back()
                if step.settings is not None:
                    put_settings_back(step.optimizer, step.settings)
                undone.add(step.optimizer)
        unkept = tuple(self._buffers.unkept())
        self._buffers.put_back()
        return unkept

    def close(self) -> None:
        """Take the flag off the optimizers and let everything go; closing twice does no harm."""
        if self._veto is not None:
            self._veto.close()
        self._step = self._latest = self._now = None
        self._is_fused.clear()
        self._keys.clear()
        self._scaler_skips.clear()

    def _open(self) -> None:
        number, micro = self._now or (0, MicroBatch(0, None))
        if micro.losses or self._n_steps_in_batch:  # a second step within the batch has losses of its own
            micro = MicroBatch(
                micro.index,
                micro.batch,
                start=micro.start,
                steps_before=self._n_steps_in_batch,
                resumed=self._start(micro.batch),
            )
        self._step = self._latest = Step(number, self._mark(), [micro])
        flag = None if self._veto is None else self._veto.flag
        if flag is not None and self._max_skips:
            self._buffers.put_back(where=flag)
        self._buffers.keep(unless=flag)

    def _let_go(self) -> None:
        pending = self._veto.notes() if self._veto is not None else ()
        steps = [*pending, *([self._step] if self._step else [])]
        held = [micro for step in reversed(steps) for micro in reversed(step.micro)]
        if len(held) > 2:  # noqa: PLR2004, the present one and one more are always held
            let_go(held, self._budget_bytes, self._move)

    def _honours(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._is_fused:
            self._is_fused[optimizer] = honours_found_inf(optimizer)
        return self._is_fused[optimizer]

    def _check_on_device(self, step: Step, optimizer: Optimizer) -> Trip | None:
        keys = self._keys.get(optimizer)
        created = keys is not None and not keys.are_current()
        # Ranks must not differ in when they read. And what a vetoed first step created must be gone before the next
        # step uses it: that waits once.
        trip = self._read(wait=created or self._ranks.world_size > 1)
        if trip is not None:
            return trip
        if keys is None or created:
            keys = self._keys[optimizer] = StateKeys(optimizer)
        step.keys, step.settings = keys, settings_of(optimizer)
        step.parameters, gradients = gradients_of(optimizer)
        self.saw_gradients = self.saw_gradients or bool(gradients)
        step.traces = GradientTraces(step.parameters)
        losses = step.losses()
        numbers = measure_exactly(gradients, losses)
        if numbers is None:
            return None
        if self._veto is None:
            self._veto = Veto(numbers.device, self._max_skips)
        # Under data parallelism a rank's own loss must not decide: the others do not know it. `poison` tells them.
        n_deciding = 1 if self._gradients == "replicated" else 1 + len(losses)
        self._veto.check(optimizer, numbers.to(self._veto.flag.device, non_blocking=True), n_deciding, step)
        return None

    def _read(self, *, wait: bool) -> Trip | None:
        if self._veto is None:
            return None
        readings = self._veto.read(wait=wait)
        for position, reading in enumerate(readings, start=1):
            step, n_losses = reading.note, len(reading.note.losses())
            losses, norms = reading.numbers[1 : 1 + n_losses], reading.numbers[1 + n_losses :]
            self._remember(step, losses, reading.numbers[0])
            if reading.halts:
                assert step.traces is not None
                bad = step.traces.bad(names_of(self._model, step.parameters), norms)
                later = tuple(each.note for each in (*readings[position:], *self._veto.read(wait=True)))
                return Trip(step, tuple(losses), reading.numbers[0], tuple(bad), late=True, later=later)
            if reading.bad:
                assert step.keys is not None
                step.keys.put_back()
                if step is self._latest:  # else the next step began by putting them back, on the device
                    self._buffers.put_back()
                self._note_skip(step)
            elif not all(map(math.isfinite, losses)):
                self._warn_of_private_loss()
        return None

    def _check_on_host(self, step: Step, optimizer: Optimizer, scaler: Any) -> Trip | None:
        step.parameters, gradients = gradients_of(optimizer)
        self.saw_gradients = self.saw_gradients or bool(gradients)
        losses = step.losses()
        numbers = measure(gradients, losses)
        if self._gradients == "sharded":
            numbers = over_ranks(numbers, 1 + len(losses), next(self._model.parameters()).device)
        if numbers is None:
            return None
        values = numbers.tolist()
        norm, loss_values, norms = values[0], values[1 : 1 + len(losses)], values[1 + len(losses) :]
        if self._gradients == "sharded":
            is_suspect = not math.isfinite(norms.pop())
        else:
            is_suspect = not all(map(math.isfinite, values[:1] if self._gradients == "replicated" else values))
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            norm /= scaler.get_scale()  # these optimizers get their gradients still scaled
        self._remember(step, loss_values, norm)
        bad_loss = not all(map(math.isfinite, loss_values))
        if not is_suspect:
            self._scaler_skips.pop(optimizer, None)
            if bad_loss:
                self._warn_of_private_loss()
            return None
        named = zip(names_of(self._model, step.parameters), gradients, norms, strict=True)
        trip = Trip(step, tuple(loss_values), norm, tuple(count_bad(list(named))), late=False)
        return self._judge(trip, optimizer, scaler, bad_loss=bad_loss)

    def _judge(self, trip: Trip, optimizer: Optimizer, scaler: Any, *, bad_loss: bool) -> Trip | None:
        """A norm or a loss is NaN or Inf: is the step bad, does the scaler deal with it, may it be skipped?"""
        bad_gradient = bool(trip.gradients)
        if self._ranks.world_size > 1 and (self._gradients == "sharded" or scaler is not None):
            everyone = self._ranks.gather((bad_loss, bad_gradient))
            bad_loss, bad_gradient = any(loss for loss, _ in everyone), any(gradient for _, gradient in everyone)
        if not bad_loss and not bad_gradient:
            self._scaler_skips.pop(optimizer, None)
            return None  # finite gradients whose norm overflows
        if scaler is not None and not bad_loss:
            self._scaler_skips[optimizer] += 1
            skips, scale = self._scaler_skips[optimizer], scaler.get_scale()
            if skips < self._amp_patience and scale >= 1:
                return None
            reason = (
                f"the gradient scaler skipped {skips} step{'s' * (skips > 1)} in a row and is at a scale of {scale:g}"
            )
            trip = Trip(trip.step, trip.losses, trip.norm, trip.gradients, late=False, scaler=reason)
        if len(self.skipped) >= self._max_skips:
            return trip
        self._skip(trip.step, optimizer, scaler)
        return None

    def _skip(self, step: Step, optimizer: Optimizer, scaler: Any) -> None:
        if scaler is None:
            hide_gradients(optimizer)
        else:
            # The scaler wants gradients to look at, and skips the update itself if one is not finite. Where it has
            # looked already, hiding them is what stops the update.
            handles_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
            for gradient in gradients_of(optimizer)[1] if handles_scale else ():
                gradient.fill_(torch.inf)
            if not handles_scale:
                hide_gradients(optimizer)
        self._buffers.put_back()
        self._note_skip(step)

    def _note_skip(self, step: Step) -> None:
        self.skipped.append((step.number, tuple(micro.index for micro in step.micro)))

    def _remember(self, step: Step, losses: list[float], norm: float) -> None:
        self.history.append(Past(step.number, sum(losses) / len(losses) if losses else math.nan, norm))

    def _warn_of_private_loss(self) -> None:
        if not self._has_warned:
            warnings.warn(
                f"The loss of rank {self._ranks.rank} is NaN or Inf while the gradients of all ranks are finite, so "
                "the other ranks cannot know and training goes on. This is said once.",
                stacklevel=2,
            )
        self._has_warned = True
