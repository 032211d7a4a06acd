"""Checks each step between backward and update: good steps pass, bad ones are held back and can be undone."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_memtools._torch import is_in_memory, takes_scaled_gradients, write_count_or_none
from lightning_memtools.memory.arriving_values import ArrivingValues
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.nested_tensors import in_new_containers, map_tensors, names_of, tensors_in
from lightning_memtools.memory.virtual import VirtualDevice, host_memory
from lightning_memtools.nonfinite.finite_checks import (
    BadInput,
    BadTensor,
    bad_inputs,
    count_bad,
    gradients_of,
    measure,
    measure_and_read,
)
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.reporting.strategies import strategy_family, why_unsupported
from lightning_memtools.state.buffer_keeper import BufferKeeper
from lightning_memtools.state.random_state import RandomState

Gradients = Literal["whole", "replicated", "sharded"]


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A micro-batch of an optimizer step, with its losses."""

    index: int  # the batch index within the epoch
    batch: Any  # the batch as training_step got it, on the host after it was moved; None where hooks do not see it
    random: RandomState | None = None  # the random streams before it; None where no step is run again
    # the losses that were sent backward for it, as 0-dim tensors, as training_step returned them
    losses: list[Tensor] = field(default_factory=list)
    updates_before: int = 0  # in manual optimization: the updates that this batch made before this step began
    was_moved: bool = False
    is_copied: bool = False  # whether the step has tensors of its own, so that it cannot write to these

    def move_to_host(self) -> None:
        """Replace the batch's tensors with copies in host memory. On a GPU the copies are asynchronous."""
        if not self.was_moved:
            with host_memory():
                self.batch, self.was_moved = map_tensors(self.batch, _on_host), True

    def bad_inputs(self) -> list[BadInput]:
        """Return the batch's tensors with NaN or Inf."""
        return bad_inputs(self.batch, self.index)


class BatchKeeper:
    """Keeps each batch as training_step received it, because training_step may change its batch.

    Dicts and lists are always copied, tensors only if training_step has written to a tensor of the first two batches.
    """

    def __init__(self) -> None:
        self.copies = False
        self._n_watched, self._counts = 0, list[tuple[Tensor, int]]()

    def keep(self, batch: Any) -> Any:
        """Copy a batch, so that training_step cannot change the copy. Call this before training_step gets the batch."""
        if self.copies:
            return map_tensors(batch, _copied)
        self._n_watched += 1
        if self._n_watched <= 2:  # noqa: PLR2004, as said above
            self._counts = [(tensor, write_count_or_none(tensor)) for tensor in tensors_in(batch)]
        return in_new_containers(batch)

    def end_batch(self) -> None:
        """Check whether training_step wrote to tensors of the batch. If so, tensors of later batches are copied."""
        self.copies = self.copies or any(write_count_or_none(tensor) != count for tensor, count in self._counts)
        self._counts = []


@torch.no_grad()
def _copied(tensor: Tensor, device: str | None = None) -> Tensor:
    if not is_in_memory(tensor):
        return tensor
    # Its strides are kept: they choose the kernel that computes, and so the last bits. Not waiting pins the memory.
    copied = tensor.detach().to(device or tensor.device, non_blocking=True, copy=True)
    return copied.requires_grad_(tensor.requires_grad)


def _on_host(tensor: Tensor) -> Tensor:
    is_there = tensor.device.type == "cpu" and VirtualDevice.current() is None
    return tensor if is_there else _copied(tensor, "cpu")


@dataclass(slots=True, eq=False)  # one is made in each step, and a frozen one takes three times as long
class GuardedStep:
    """An optimizer step, from its first micro-batch to its update, with its losses and gradient norms."""

    number: int  # the training step, counted as the x axis of the logs counts
    micro: list[MicroBatch]  # its micro-batches, oldest first
    # puts the caller's counters back to the start of this step; None while that is not known yet
    restore_loop: Callable[[], None] | None
    optimizer: Optimizer | None = None  # the optimizer that makes the update, once that is known
    parameters: Sequence[Tensor] = ()  # the parameters with a gradient
    restore_settings: Callable[[], None] = lambda: None  # those of the optimizer, where the step is decided late
    # --- what was read of it
    read_losses: tuple[float, ...] = ()  # this rank's, in the order of `losses()`
    norms: tuple[float, ...] = ()  # of each gradient
    norm: float = math.nan  # the L2 norm over all gradients, before clipping; of all ranks where each has only a part
    mean_loss: float = math.nan  # the mean of this rank's losses; NaN if there are none
    worst_loss: float = math.nan  # the largest mean loss of all ranks
    gradients: tuple[BadTensor, ...] = ()  # the bad ones
    scaler: str = ""  # says what the gradient scaler did, where that makes the step bad

    def losses(self) -> list[Tensor]:
        """Return the losses of all micro-batches."""
        return [loss for micro in self.micro for loss in micro.losses]


@dataclass(slots=True)
class PastStep:
    """The step number, loss and gradient norm of an earlier step."""

    step: int
    loss: float  # the mean of the step's losses on this rank; NaN if it had none
    norm: float  # the L2 norm of all gradients, before clipping


@dataclass(frozen=True, slots=True)
class ReadingWatch:
    """A function that is called with each step without NaN or Inf, and may prevent the step's update."""

    decides: bool  # whether it may hold updates back: then each step is read before its update, and the host waits
    read: Callable[[GuardedStep], bool]  # returns whether the step's update is to be held back


class UpdateFlag:
    """Decides on the device whether an optimizer step may change weights. The host reads the decision later.

    `flag` is a 0-dim float32 tensor that is set as `found_inf` on fused optimizers: if it is 1, they change nothing.
    After a bad step it stays 1, so that the host may read it at any later time. It is None before the first check.
    """

    def __init__(self) -> None:
        self.flag: Tensor | None = None
        self._sent: ArrivingValues[GuardedStep] = ArrivingValues()
        self._attached: set[Optimizer] = set()

    @torch.no_grad()
    def check(self, optimizer: Optimizer, numbers: Tensor, deciding: slice, step: GuardedStep) -> None:
        """If any of `numbers[deciding]` is NaN or Inf, prevent the update of this step and of all later steps."""
        if self.flag is None:
            self.flag = torch.zeros((), device=numbers.device)
        numbers = numbers.to(self.flag.device, non_blocking=True)
        bad = ~torch.isfinite(numbers[deciding]).all()
        # Exactly 0 or 1: the kernels subtract it from the step count.
        self.flag.copy_(bad | (self.flag != 0))
        optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        self._attached.add(optimizer)
        self._sent.send(torch.cat([self.flag.to(numbers.dtype).reshape(1), numbers]), step)

    def undecided(self) -> list[GuardedStep]:
        """Return the steps whose results the host has not read yet, oldest first."""
        return self._sent.notes()

    def read(self, *, wait: bool) -> list[tuple[GuardedStep, bool, list[float]]]:
        """Return (step, whether its update was prevented, its numbers) for each result on the host, oldest first.

        With `wait`, wait for all results first.
        """
        return [(step, bool(bad), numbers) for (bad, *numbers), step in self._sent.receive(wait=wait)]

    def close(self) -> None:
        """Remove the flag from all optimizers, so that they make updates again. Idempotent."""
        for optimizer in self._attached:
            if getattr(optimizer, "found_inf", None) is self.flag:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self._attached.clear()
        self._sent.clear()


class ExchangedError(RuntimeError):
    """Raised on all ranks at the same step if any rank could not read its losses and gradients."""


class StepGuard:
    """Checks the losses and gradients of every optimizer step for NaN and Inf, between backward and update.

    Usually the host waits for the losses and gradient norms before the update. But if the optimizer is fused and on a
    GPU, there is no gradient scaler, and `max_skips` is 0, the host does not wait: a flag on the device makes the
    optimizer ignore a bad step, and the host reads the flag one step later.

    Call `begin` before a batch's forward pass, `loss` before its backward pass, `check` after backward, and
    `before_update` right before the update. If `check` or `drain` returns a bad step, pass it to `undo`.

    `max_skips` and `amp_patience` are as in HaltOnNaN. With `records`, random states are recorded for a rerun.
    `gradients` is "whole" for a single rank, "replicated" if all ranks have the same gradients, and "sharded" if each
    rank has a part of the gradients. `mark_loop` is called at the start of each step, and returns a function with
    which `undo` resets the caller's counters. `watch` is called with each step without NaN or Inf.

    Attributes:
        history: The losses and norms of the last 20 steps, oldest first.
        skipped: The bad steps that were skipped so far, as (step number, batch indices).
        carries_losses: True if a bad loss turns all gradients into NaN, so that the other ranks notice it.
        is_sharded: True if each rank has only a part of the weights and gradients.
        exchanges: True if each check runs a collective, in which all ranks take part.
        failure: The reason why this rank cannot go on, set by the caller. The next check then raises on all ranks.
    """

    def __init__(
        self,
        model: Module,
        *,
        max_skips: int = 0,
        amp_patience: int = 20,
        records: bool = True,
        gradients: Gradients = "whole",
        ranks: RankGather | None = None,
        mark_loop: Callable[[], Callable[[], None]] = lambda: lambda: None,
        watch: ReadingWatch | None = None,
    ) -> None:
        self.history: deque[PastStep] = deque(maxlen=20)
        self.skipped: list[tuple[int, tuple[int, ...]]] = []
        self.failure = ""
        self.carries_losses, self.is_sharded = gradients == "replicated", gradients == "sharded"
        self._model, self._max_skips, self._amp_patience, self._records = model, max_skips, amp_patience, records
        self._ranks, self._mark_loop, self._watch = ranks or RankGather(), mark_loop, watch
        self.exchanges = self.is_sharded or (watch is not None and self._ranks.world_size > 1)
        self._buffers, self._batches = BufferKeeper(model), BatchKeeper()
        self._flag = UpdateFlag()
        self._is_fused: dict[Optimizer, bool] = {}
        self._scaler_skips: Counter[Optimizer] = Counter()
        self._number, self._n_updates = 0, 0  # those of the present batch
        self._batch: tuple[int, Any, RandomState | None] = (0, None, None)  # its index, what is in it, the streams
        self._step: GuardedStep | None = None  # None between a check and the next forward pass
        self._to_skip: Optimizer | None = None

    def begin(self, batch: Any, batch_idx: int, number: int, *, first: bool = True) -> None:
        """Store a batch before its forward pass. With `first`, it is the first micro-batch of the step `number`."""
        streams = RandomState.now() if self._records else None
        self._batch = batch_idx, self._batches.keep(batch), streams
        self._number, self._n_updates, step = number, 0, self._step
        if first or step is None or not step.losses():
            step = self._open()
        else:
            step.micro.append(self._micro())
        undecided = self._flag.undecided()
        if undecided or len(step.micro) > 1:
            held = [micro for each in (*undecided, step) for micro in each.micro]
            for micro in held[:-2]:  # the present one and one more stay on the device
                micro.move_to_host()

    def end_batch(self) -> None:
        """Drop this guard's own reference to the batch. The current step keeps the batch until the step is checked."""
        self._batch = self._batch[0], None, None
        self._batches.end_batch()

    def loss(self, loss: Tensor, *, divided_by: int = 1, scaler: Any = None) -> None:
        """Record a loss before its backward pass, undoing its division by `divided_by` and its scaling by `scaler`."""
        step = self._step or self._open()
        step.restore_loop = step.restore_loop or self._mark_loop()
        scale = None if scaler is None else scaler.scale(torch.ones((), device=loss.device))
        step.micro[-1].losses.append(undivided_loss(loss, divided_by, scale))
        if self.carries_losses:
            poison(loss)

    def check(self, optimizer: Optimizer, *, scaler: Any = None, reopen: bool = False) -> GuardedStep | None:
        """Check the step before its update. If this or an earlier step has to end training, return that step.

        With `reopen`, the batch may have further optimizer steps. ExchangedError is raised on all ranks if one rank
        could not read its losses and gradients.
        """
        step, self._step = self._step or self._open(), None
        step.restore_loop = step.restore_loop or self._mark_loop()
        step.optimizer = optimizer
        step.parameters, gradients = gradients_of(optimizer)
        if scaler is None and not reads_at_once(gradients) and self._can_flag(optimizer, step.parameters):
            bad = self._check_on_device(step, optimizer, gradients)
        else:
            bad = self.drain() or self._check_on_host(step, optimizer, gradients, scaler)
        if bad is None and reopen:
            self._n_updates += 1
            self._open().restore_loop = None  # to be set when the update has been made
        return bad

    def before_update(self, optimizer: Optimizer) -> None:
        """If the step is to be skipped, remove the gradients, so that no weight changes. Call this after all hooks."""
        if self._to_skip is optimizer:
            self._to_skip = None
            Optimizer.zero_grad(optimizer)  # to None: the update skips all and creates no state

    def drain(self, *, wait: bool = True) -> GuardedStep | None:
        """Wait for the results of all checks that the host has not read yet. Return the first bad step, or None.

        Without `wait`, only those that have arrived are read.
        """
        decided = self._flag.read(wait=wait)
        for position, (step, is_held_back, numbers) in enumerate(decided, start=1):
            self._note_numbers(step, numbers)
            if not is_held_back:
                self._note_good(step)
                continue
            self._remember(step)
            # By now the gradients may be clipped, or those of the next step: their norms are all that is known.
            named = zip(names_of(self._model, step.parameters), step.parameters, step.norms, strict=True)
            step.gradients = tuple(
                BadTensor(name, None, None, p.numel(), norm) for name, p, norm in named if not math.isfinite(norm)
            )
            later = [*decided[position:], *self._flag.read(wait=True)]
            for each, *_ in reversed(later):  # they were held back, too, but schedulers have counted them
                each.restore_settings()
            return step
        return None

    def undo(self, bad: GuardedStep) -> tuple[str, ...]:
        """Restore buffers, optimizer settings and the caller's counters. Return the names of what was not restored."""
        bad.restore_settings()
        unrestored = self._buffers.unrestored()
        if isinstance(bad.optimizer, LBFGS):
            unrestored.append("weights and optimizer state that evaluations of the loss in this step have moved")
        self._buffers.restore()
        if bad.restore_loop is not None:
            bad.restore_loop()
        return tuple(unrestored)

    def close(self) -> None:
        """Remove the flag that makes optimizers skip updates, and release all tensors. Idempotent."""
        self._flag.close()
        self._step = None
        self.end_batch()
        self._is_fused.clear()
        self._scaler_skips.clear()

    def _open(self) -> GuardedStep:
        step = self._step = GuardedStep(self._number, [self._micro()], self._mark_loop())
        self._buffers.keep(unless=self._flag.flag)
        return step

    def _micro(self) -> MicroBatch:
        return MicroBatch(*self._batch, updates_before=self._n_updates, is_copied=self._batches.copies)

    # --- one way: read before the update

    def _check_on_host(
        self, step: GuardedStep, optimizer: Optimizer, gradients: list[Tensor], scaler: Any
    ) -> GuardedStep | None:
        losses = step.losses()
        # get_scale() would wait for the device once more.
        is_scaled = scaler is not None and bool(gradients) and takes_scaled_gradients(optimizer)
        scales = [scaler.scale(torch.ones((), device=gradients[0].device))] if is_scaled else []
        before = [*losses, *scales]
        shared = self._measured(losses, gradients, before, exact=False) if self.exchanges else None
        numbers = measure_and_read(gradients, before) if shared is None else shared.tolist()
        if numbers is None:
            return None
        scale = numbers.pop(len(losses)) if scales else 1.0
        is_bad_anywhere = self._note_numbers(step, numbers)
        # Under data parallelism a rank's own loss must not decide: the others do not know it. `poison` tells them.
        mine = (step.norm,) if self.carries_losses else (step.norm, *step.read_losses)
        is_suspect = is_bad_anywhere if self.is_sharded else not all(map(math.isfinite, mine))
        step.norm = step.norm / (scale or math.nan) if scales else step.norm
        if not is_suspect:
            self._scaler_skips.pop(optimizer, None)
            if self._note_good(step):
                self._hold_back(optimizer, scaler)
            return None
        self._remember(step)
        named = zip(names_of(self._model, step.parameters), gradients, step.norms, strict=True)
        step.gradients = tuple(count_bad(list(named)))
        return step if self._ends_training(step, optimizer, scaler) else None

    def _ends_training(self, step: GuardedStep, optimizer: Optimizer, scaler: Any) -> bool:
        """Return whether a step that looks bad ends training. If not, its update is made, or skipped if it is bad."""
        bad_loss, bad_gradient = not all(map(math.isfinite, step.read_losses)), bool(step.gradients)
        if self._ranks.world_size > 1 and (self.is_sharded or scaler is not None):
            everyone = self._ranks.objects((bad_loss, bad_gradient))
            bad_loss, bad_gradient = any(loss for loss, _ in everyone), any(gradient for _, gradient in everyone)
        if not bad_loss and not bad_gradient:  # only the norm overflows
            self._scaler_skips.pop(optimizer, None)
            return False
        if scaler is not None and not bad_loss:
            self._scaler_skips[optimizer] += 1
            scale, n_in_a_row = scaler.get_scale(), self._scaler_skips[optimizer]
            if scale >= 1 and n_in_a_row < self._amp_patience:
                return False  # the scaler itself skips the update, as is normal at first
            step.scaler = (
                f"the gradient scaler skipped {n_in_a_row} step{'s' * (n_in_a_row > 1)} in a row and is at a scale of "
                f"{scale:g} (HaltOnNaN allows {self._amp_patience} in a row above a scale of 1: amp_patience)"
            )
        if len(self.skipped) >= self._max_skips:
            return True
        self._hold_back(optimizer, scaler)
        self.skipped.append((step.number, tuple(micro.index for micro in step.micro)))
        return False

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
        if self.is_sharded or self._max_skips or (self._watch is not None and self._watch.decides):
            return False  # whether this update is made must be known before it, and not only held back with all others
        if optimizer not in self._is_fused:
            self._is_fused[optimizer] = honours_found_inf(optimizer)
        return self._is_fused[optimizer] and not creates_state(optimizer, parameters)

    def _check_on_device(self, step: GuardedStep, optimizer: Optimizer, gradients: list[Tensor]) -> GuardedStep | None:
        bad = self.drain(wait=self._ranks.world_size > 1)  # ranks must not differ in when they read
        if bad is not None:
            return bad
        step.restore_settings = mark_settings(optimizer)
        losses = step.losses()
        numbers = self._measured(losses, gradients, losses, exact=True)
        if numbers is not None:
            deciding = slice(len(losses) if self.carries_losses else 0, len(losses) + len(gradients))
            self._flag.check(optimizer, numbers, deciding, step)
        return None

    # --- of both

    def _measured(
        self, losses: list[Tensor], gradients: list[Tensor], before: list[Tensor], *, exact: bool
    ) -> Tensor | None:
        """Return one tensor: `before`, each gradient's norm and, if ranks exchange results, those of `over_ranks`."""
        if not self.exchanges:
            return measure(gradients, before, exact=exact)
        numbers = None
        try:
            numbers = None if self.failure else measure(gradients, before, exact=exact)
        except Exception as error:  # noqa: BLE001, the other ranks wait for this one's numbers
            self.failure = in_one_line(error)
        device = next(self._model.parameters()).device
        shared = over_ranks(numbers, losses, len(before), device, has_failed=bool(self.failure))
        if self.failure:
            raise ExchangedError(self.failure)
        return shared

    def _note_numbers(self, step: GuardedStep, numbers: list[float]) -> bool:
        """Store the numbers that were read of a step. Return True if ranks exchange them and any is bad anywhere."""
        n = len(step.losses())
        losses, shared = tuple(numbers[:n]), numbers[-4:] if self.exchanges else []
        norms = tuple(numbers[n : len(numbers) - len(shared)])
        step.read_losses, step.norms, step.norm = losses, norms, math.hypot(*norms)
        step.worst_loss = step.mean_loss = sum(losses) / len(losses) if losses else math.nan
        if not shared:
            return False
        norm, worst_loss, is_bad, has_failed = shared
        if has_failed:
            raise ExchangedError("another rank could not read its step")
        step.norm = norm if self.is_sharded else step.norm
        step.worst_loss = worst_loss if losses else math.nan
        return bool(is_bad)

    def _note_good(self, step: GuardedStep) -> bool:
        """Add a finite step to the history. Return True if `watch` (LossSpikes) wants to skip its update."""
        self._remember(step)
        try:
            return self._watch is not None and self._watch.read(step)
        except Exception:  # it ends the run
            self.undo(step)
            raise

    def _remember(self, step: GuardedStep) -> None:
        # A second optimizer's update without a loss of its own has that of the update before.
        loss = step.mean_loss if step.losses() or not self.history else self.history[-1].loss
        self.history.append(PastStep(step.number, loss, step.norm))


def undivided_loss(loss: Tensor, divided_by: int, scale: Tensor | None) -> Tensor:
    """Return a loss as it was before it was divided for gradient accumulation and scaled, as a 0-dim tensor."""
    value = loss.detach()
    if divided_by != 1 or scale is not None or value.dtype != torch.float32:
        # A float64 loss may be finite beyond float32's range.
        value = (value if value.dtype == torch.float64 else value.float()) * divided_by
        value = value if scale is None else value / scale
    return value if value.dim() == 0 else value.mean()


def reads_at_once(gradients: list[Tensor]) -> bool:
    """Return True if the gradients are on the CPU, so that the host can read them without waiting for a device."""
    return not gradients or gradients[0].is_cpu


class HiddenGradientsError(ValueError):
    """Raised at setup if the Trainer's strategy hides the gradients. The message says why, and what to do."""


def gradients_under(strategy: type, *, world_size: int) -> Gradients:
    """Return whether gradients are "whole", "replicated" or "sharded" (see StepGuard). Raise if they are hidden."""
    reason = why_unsupported("HaltOnNaN", strategy)
    if reason is not None:
        raise HiddenGradientsError(
            f"HaltOnNaN cannot guard a run under {strategy.__name__}: {reason} Remove HaltOnNaN, or train with a "
            "strategy that lets it see the gradients: single device, DDP, FSDP or ModelParallelStrategy."
        )
    family = strategy_family(strategy)
    if family in {"SingleDevice", "DDP"}:
        return "whole" if family == "SingleDevice" else "replicated"
    # The result of deciding together in each step is right under any strategy, also under one that is not known.
    return "sharded" if family in {"FSDP", "ModelParallel"} or world_size > 1 else "whole"


def honours_found_inf(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's step() does nothing while the device tensor `optimizer.found_inf` is 1.

    This holds for PyTorch's fused kernels, which then leave even step counts unchanged. It may not hold for subclasses
    and for other packages' optimizers. With float64 parameters, the result is False: the norm could overflow.
    """
    return type(optimizer) in {SGD, Adam, AdamW, Adagrad} and all(
        group.get("fused")
        and all(p.device.type in {"cpu", "cuda"} and p.dtype != torch.float64 for p in group["params"])
        for group in optimizer.param_groups
    )


def creates_state(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Return True if the next update would create optimizer state. If it is skipped, fused SGD sets no valid state."""
    if type(optimizer) is SGD and not any(group["momentum"] for group in optimizer.param_groups):
        return False
    return not all(map(optimizer.state.__contains__, parameters))


def mark_settings(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that restores the optimizer's current settings, such as learning rates."""
    kept = [
        {key: each.clone() if isinstance(each, Tensor) else each for key, each in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

    @torch.no_grad()
    def restore() -> None:
        for group, saved in zip(optimizer.param_groups, kept, strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key].copy_(value)  # schedulers write into a learning rate that is a tensor
                else:
                    group[key] = value

    return restore


@torch.no_grad()
def over_ranks(
    numbers: Tensor | None, losses: Sequence[Tensor], n_before: int, device: torch.device, *, has_failed: bool
) -> Tensor:
    """Append four results over all ranks to `numbers`. Runs one collective; does not wait for the device.

    `numbers` is from `measure`: this rank's losses and, from index `n_before` on, its gradient norms. The four results
    are the norm over the gradients of all ranks (only useful for sharded gradients), the largest mean loss of a rank,
    1 if a number on any rank is NaN or Inf, else 0, and 1 if `has_failed` is True on any rank, else 0.
    """
    if numbers is None:
        numbers = torch.zeros(0, device=device, dtype=torch.float64)
    mean = torch.stack(list(losses)).mean() if losses else numbers.new_zeros(())
    is_bad = ~torch.isfinite(numbers).all()
    squares = torch.linalg.vector_norm(numbers[n_before:], dtype=torch.float64).square()
    own = [squares, mean, is_bad, torch.full_like(is_bad, has_failed)]
    mine = torch.stack([number.to(device, torch.float64) for number in own])
    everyone = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, mine)
    squares, *highest = torch.stack(everyone).unbind(1)
    results = torch.stack([squares.sum().sqrt(), *(each.max() for each in highest)])
    return torch.cat([numbers.to(device, torch.float64), results])


def poison(loss: Tensor) -> None:
    """Make all gradients of this backward pass NaN if the loss is NaN or Inf; otherwise leave every bit unchanged.

    Under data parallelism, gradients are averaged over the ranks but losses are not. The NaN in the
    gradients tells all ranks of a bad loss, without another collective and without waiting for the device.
    """
    if not loss.requires_grad:
        return
    value = loss.detach()
    factor = torch.where(torch.isfinite(value), 1.0, torch.nan).to(value.dtype)
    loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
