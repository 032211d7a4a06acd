"""Checks each step between backward and update: lets good steps pass, holds bad ones back, and can undo them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_memtools._torch import takes_scaled_gradients
from lightning_memtools.memory.nested_tensors import names_of
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.nonfinite.finite_checks import BadTensor, count_bad, gradients_of, measure, measure_and_read
from lightning_memtools.nonfinite.guarded_step import (
    GuardedStep,
    MicroBatch,
    PastStep,
    depends_on_weights,
    do_nothing,
    undivided_loss,
)
from lightning_memtools.nonfinite.update_flag import (
    UpdateFlag,
    creates_state,
    hide_gradients,
    honours_found_inf,
    largest_mean_loss,
    over_ranks,
    poison,
)
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.reporting.strategies import strategy_family, why_unsupported
from lightning_memtools.state.buffer_keeper import BufferKeeper
from lightning_memtools.state.starts import mark_settings

Gradients = Literal["whole", "replicated", "sharded"]

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
    save_last_good: bool = True
    explain: bool = True
    save_step: bool = True
    directory: str | None = None

    def __post_init__(self) -> None:
        if not is_count(self.max_skips, least=0):
            raise ValueError(
                f"max_skips={self.max_skips!r} is not a number of steps. Use 0 to halt at the first bad step."
            )
        if not is_count(self.amp_patience):
            raise ValueError(
                f"amp_patience={self.amp_patience!r} is not a number of steps. Use 1 to halt at the first skip."
            )


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


class Verdict(Enum):
    """The decision on a step whose numbers were read."""

    GOOD = auto()  # its update is made
    LEFT_TO_SCALER = auto()  # the gradient scaler skips its update, as is normal at first
    SKIP = auto()  # its update is held back, and training goes on
    HALT = auto()  # its update is held back, and training ends


def judge(
    options: HaltOptions, *, bad_loss: bool, bad_gradient: bool, n_skipped: int, scale: float | None, n_in_a_row: int
) -> Verdict:
    """Return the verdict on a step.

    Args:
        options: The arguments of HaltOnNaN.
        bad_loss: Whether a loss is NaN or Inf.
        bad_gradient: Whether a gradient is.
        n_skipped: The number of bad steps that were skipped before.
        scale: The gradient scaler's; None without one.
        n_in_a_row: The number of steps that the scaler skips in a row, this one included.
    """
    if not bad_loss and not bad_gradient:
        return Verdict.GOOD
    if scale is not None and not bad_loss and n_in_a_row < options.amp_patience and scale >= 1:
        return Verdict.LEFT_TO_SCALER
    return Verdict.SKIP if n_skipped < options.max_skips else Verdict.HALT


@dataclass(frozen=True, slots=True)
class HeldBackStep:
    """A bad step that ends the run: its update was held back."""

    step: GuardedStep
    losses: tuple[float, ...]  # on this rank, in the order of `step.losses()`
    norm: float  # over all its gradients
    gradients: tuple[BadTensor, ...] = ()  # the bad ones
    late: bool = False  # whether the update was held back on the device and the host learned of it afterwards
    scaler: str = ""  # says what the gradient scaler did, where that is the reason; else empty
    # the steps that were held back after it, because the host did not know of it yet
    later: tuple[GuardedStep, ...] = ()


@dataclass(slots=True)
class _PresentBatch:
    """The batch whose forward pass began last."""

    number: int  # of its training step
    micro: MicroBatch
    n_updates: int = 0  # in manual optimization


class StepGuard:
    """Checks every optimizer step between backward and update.

    There are two ways. A step is read before its update, and the host waits for a few numbers. Or, with a fused
    optimizer on a GPU, without a gradient scaler and skips, a flag on the device holds the update back, the host reads
    it one step late, and nothing waits.

    Call `begin` before a batch's forward pass, `loss` before its backward pass, `check` when backward is done, and
    `before_update` last. If `check` or `drain` returns a step, it is bad: call `undo` to restore what it has changed,
    then stop.

    Args:
        model: The module that is trained.
        options: The arguments of HaltOnNaN.
        gradients: How a rank's gradients relate to those of the others: there is one rank (whole), all have the same
            after backward (replicated), each has a part (sharded).
        ranks: Gathers from all ranks.
        mark_loop: Called at the start of each step; returns a function that puts the caller's counters back to there,
            which `undo` calls.
        watch: Sees what was read of each finite step.

    Attributes:
        history: The last 20 steps, oldest first.
        skipped: (step, batch indices) of the bad steps that were skipped so far.
        saw_losses: Whether there was any loss that depends on weights.
        saw_gradients: Whether there was any gradient: gradients that are not in p.grad cannot be checked.
    """

    def __init__(
        self,
        model: Module,
        options: HaltOptions = HaltOptions(),
        *,
        gradients: Gradients = "whole",
        ranks: RankGather | None = None,
        mark_loop: Callable[[], Callable[[], None]] = lambda: do_nothing,
        watch: ReadingWatch | None = None,
    ) -> None:
        self.history: deque[PastStep] = deque(maxlen=20)
        self.skipped: list[tuple[int, tuple[int, ...]]] = []
        self.saw_losses = self.saw_gradients = False
        self._model, self._options, self._gradients = model, options, gradients
        self._ranks, self._mark_loop, self._watch = ranks or RankGather(), mark_loop, watch
        self._buffers = BufferKeeper(model)
        self._flag: UpdateFlag | None = None
        self._is_fused: dict[Optimizer, bool] = {}
        self._scaler_skips: Counter[Optimizer] = Counter()
        self._batch: _PresentBatch | None = None
        self._step: GuardedStep | None = None  # None between a check and the next forward pass
        self._to_skip: Optimizer | None = None

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
        micro = MicroBatch.beginning(batch_idx, batch, records=self._options.explain or self._options.save_step)
        self._batch = _PresentBatch(number, micro)
        if first or self._step is None or not self._step.losses():
            step = self._open()
        else:
            step = self._step
            step.micro.append(micro)
        undecided = [] if self._flag is None else self._flag.undecided()
        held = [micro for each in (*undecided, step) for micro in each.micro]
        for micro in held[:-2]:  # the present one and one more stay on the device
            micro.move_to_host()

    def end_batch(self) -> None:
        """Note that the batch is over, so that it is held only as long as its step needs it."""
        self._batch = None

    def loss(self, loss: Tensor, *, divided_by: int = 1, scaler: Any = None) -> None:
        """Note a loss before its backward pass. It was divided for an accumulation and multiplied by the scaler."""
        step = self._step
        if step is None:
            step = self._open()
            step.has_moved = self._batch is not None
        step.restore_loop = step.restore_loop or self._mark_loop()
        scale = None if scaler is None else scaler.scale(torch.ones((), device=loss.device))
        step.micro[-1].losses.append(undivided_loss(loss, divided_by, scale))
        self.saw_losses = self.saw_losses or depends_on_weights(loss)
        if self.carries_losses:
            poison(loss)

    def check(self, optimizer: Optimizer, *, scaler: Any = None, reopen: bool = False) -> HeldBackStep | None:
        """Decide on the coming update. `reopen`: more forward passes may follow in the same batch."""
        step, self._step = self._step or self._open(), None
        step.restore_loop = step.restore_loop or self._mark_loop()
        step.optimizer = optimizer
        step.parameters, gradients = gradients_of(optimizer)
        self.saw_gradients = self.saw_gradients or bool(gradients)
        if self._watch is not None and self._ranks.world_size > 1:
            step.shared_loss = largest_mean_loss(step.losses(), self._model)
        if scaler is None and not reads_at_once(gradients) and self._can_flag(optimizer, step.parameters):
            held_back = self._check_on_device(step, optimizer, gradients)
        else:
            held_back = self.drain() or self._check_on_host(step, optimizer, gradients, scaler)
        if held_back is None and reopen:
            if self._batch is not None:
                self._batch.n_updates += 1
            self._open().restore_loop = None  # to be set when the update has been made
        return held_back

    def before_update(self, optimizer: Optimizer) -> None:
        """Make the update do nothing if its step is to be skipped. Call it last: clipping and hooks need gradients."""
        if self._to_skip is optimizer:
            self._to_skip = None
            hide_gradients(optimizer)

    def drain(self) -> HeldBackStep | None:
        """Wait for the results of all steps that are not decided yet; return the bad step, if there is one."""
        return self._read_flags(wait=True)

    def undo(self, held_back: HeldBackStep) -> tuple[str, ...]:
        """Restore buffers, optimizers' settings and the caller's counters; return the names of what it could not."""
        for step in reversed((held_back.step, *held_back.later)):
            step.restore_settings()
        unrestored = [*self._buffers.unrestored(), *([_MOVED_WITHIN] if held_back.step.has_moved else [])]
        self._buffers.restore()
        if held_back.step.restore_loop is not None:
            held_back.step.restore_loop()
        return tuple(unrestored)

    def close(self) -> None:
        """Stop holding back updates of the optimizers, and release all tensors. Idempotent."""
        if self._flag is not None:
            self._flag.close()
        self._step = self._batch = None
        self._is_fused.clear()
        self._scaler_skips.clear()

    def _open(self) -> GuardedStep:
        now = self._batch or _PresentBatch(0, MicroBatch(0, None))
        micro = now.micro
        if micro.losses or now.n_updates:  # a second step within the batch has losses of its own
            micro = replace(micro, losses=[], updates_before=now.n_updates)
        step = self._step = GuardedStep(now.number, self._mark_loop(), [micro])
        self._buffers.keep(unless=None if self._flag is None else self._flag.flag)
        return step

    # --- one way: read before the update

    def _check_on_host(
        self, step: GuardedStep, optimizer: Optimizer, gradients: list[Tensor], scaler: Any
    ) -> HeldBackStep | None:
        losses, n_losses = step.measured(), len(step.measured())
        scales = []
        if scaler is not None and takes_scaled_gradients(optimizer) and gradients:
            # These optimizers get their gradients still scaled. get_scale() would wait for the device once more.
            scales.append(scaler.scale(torch.ones((), device=gradients[0].device)))
        values: list[float] | None
        if self.is_sharded:
            device = next(self._model.parameters()).device
            values = over_ranks(measure(gradients, [*losses, *scales]), 1 + n_losses, device).tolist()
            is_suspect = not math.isfinite(values.pop())
        else:
            values = measure_and_read(gradients, [*losses, *scales])
            if values is None:
                return None
            is_suspect = not all(map(math.isfinite, values[:1] if self.carries_losses else values))
        norm, norms = values[0], values[1 + n_losses + len(scales) :]
        for scale in values[1 + n_losses : 1 + n_losses + len(scales)]:
            norm = norm / scale if scale else math.nan
        if not is_suspect:
            self._scaler_skips.pop(optimizer, None)
            self._note_good(step, values[1 : 1 + n_losses], norm, optimizer, scaler)
            return None
        loss_values = values[1 : 1 + len(step.losses())]
        self._remember(step, loss_values, norm)
        named = zip(names_of(self._model, step.parameters), gradients, norms, strict=True)
        held_back = HeldBackStep(step, tuple(loss_values), norm, tuple(count_bad(list(named))))
        return self._judge(held_back, optimizer, scaler)

    def _judge(self, suspect: HeldBackStep, optimizer: Optimizer, scaler: Any) -> HeldBackStep | None:
        """Let a suspect step pass, leave it to the gradient scaler, skip it, or return it."""
        bad_loss, bad_gradient = not all(map(math.isfinite, suspect.losses)), bool(suspect.gradients)
        if self._ranks.world_size > 1 and (self.is_sharded or scaler is not None):
            everyone = self._ranks.objects((bad_loss, bad_gradient))
            bad_loss, bad_gradient = any(loss for loss, _ in everyone), any(gradient for _, gradient in everyone)
        scale = None if scaler is None else scaler.get_scale()
        n_in_a_row = self._scaler_skips[optimizer] + 1
        verdict = judge(
            self._options,
            bad_loss=bad_loss,
            bad_gradient=bad_gradient,
            n_skipped=len(self.skipped),
            scale=scale,
            n_in_a_row=n_in_a_row,
        )
        if verdict is Verdict.GOOD:  # the gradients are finite, and only their norm overflows
            self._scaler_skips.pop(optimizer, None)
            return None
        if scale is not None and not bad_loss:
            self._scaler_skips[optimizer] = n_in_a_row
            if verdict is not Verdict.LEFT_TO_SCALER:
                reason = (
                    f"the gradient scaler skipped {n_in_a_row} step{'s' * (n_in_a_row > 1)} in a row and is at a scale "
                    f"of {scale:g} (HaltOnNaN allows {self._options.amp_patience} in a row above a scale of 1: "
                    "amp_patience)"
                )
                suspect = replace(suspect, scaler=reason)
        if verdict is Verdict.SKIP:
            self._hold_back(optimizer, scaler)
            self._note_skip(suspect.step)
        return suspect if verdict is Verdict.HALT else None

    def _hold_back(self, optimizer: Optimizer, scaler: Any) -> None:
        if scaler is None or not takes_scaled_gradients(optimizer):
            self._to_skip = optimizer
        else:
            # The scaler needs gradients to look at, and skips the update itself if one is not finite.
            for gradient in gradients_of(optimizer)[1]:
                gradient.fill_(torch.inf)
        self._buffers.restore()

    # --- the other way: a flag on the device

    def _can_flag(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
        if self.is_sharded or self._options.max_skips or (self._watch is not None and self._watch.decides):
            return False  # whether this update is made must be known before it, and not only held back with all others
        if optimizer not in self._is_fused:
            self._is_fused[optimizer] = honours_found_inf(optimizer)
        return self._is_fused[optimizer] and not creates_state(optimizer, parameters)

    def _check_on_device(self, step: GuardedStep, optimizer: Optimizer, gradients: list[Tensor]) -> HeldBackStep | None:
        held_back = self._read_flags(wait=self._ranks.world_size > 1)  # ranks must not differ in when they read
        if held_back is not None:
            return held_back
        step.restore_settings = mark_settings(optimizer)
        losses = step.measured()
        numbers = measure(gradients, losses, exact=True)
        if numbers is None:
            return None
        self._flag = self._flag or UpdateFlag(numbers.device)
        # Under data parallelism a rank's own loss must not decide: the others do not know it. `poison` tells them.
        n_deciding = 1 if self.carries_losses else 1 + len(losses)
        self._flag.check(optimizer, numbers.to(self._flag.flag.device, non_blocking=True), n_deciding, step)
        return None

    def _read_flags(self, *, wait: bool) -> HeldBackStep | None:
        decided = [] if self._flag is None else self._flag.read(wait=wait)
        for position, (step, is_held_back, numbers) in enumerate(decided, start=1):
            n_losses = len(step.measured())
            norm, losses, norms = numbers[0], numbers[1 : 1 + n_losses], numbers[1 + n_losses :]
            if not is_held_back:
                self._note_good(step, losses, norm)
                continue
            losses = losses[: len(step.losses())]
            self._remember(step, losses, norm)
            # By now the gradients may be clipped, or those of the next step: their norms are all that is known.
            named = zip(names_of(self._model, step.parameters), step.parameters, norms, strict=True)
            bad = [BadTensor(name, None, None, p.numel(), n) for name, p, n in named if not math.isfinite(n)]
            rest = [] if self._flag is None else self._flag.read(wait=True)
            later = tuple(each for each, *_ in (*decided[position:], *rest))
            return HeldBackStep(step, tuple(losses), norm, tuple(bad), late=True, later=later)
        return None

    # --- of both

    def _note_good(
        self,
        step: GuardedStep,
        measured: list[float],
        norm: float,
        optimizer: Optimizer | None = None,
        scaler: Any = None,
    ) -> None:
        """Note a step that is finite, and hold its update back if the watch says so; no optimizer: it has been made."""
        losses = measured[: len(step.losses())]
        self._remember(step, losses, norm)
        if self._watch is None:
            return
        loss = measured[-1] if step.shared_loss is not None and losses else self.history[-1].loss
        if self._watch.read(self, step, loss, norm, is_late=optimizer is None) and optimizer is not None:
            self._hold_back(optimizer, scaler)

    def _note_skip(self, step: GuardedStep) -> None:
        self.skipped.append((step.number, tuple(micro.index for micro in step.micro)))

    def _remember(self, step: GuardedStep, losses: list[float], norm: float) -> None:
        self.history.append(PastStep(step.number, sum(losses) / len(losses) if losses else math.nan, norm))


def reads_at_once(gradients: list[Tensor]) -> bool:
    """Return whether the host can read gradients without waiting for a device, as on the CPU."""
    return not gradients or gradients[0].is_cpu


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
