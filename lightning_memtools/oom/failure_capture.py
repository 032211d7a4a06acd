"""Follows a run, and captures the facts at the moment when memory runs out, before the error unwinds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools._torch import attach_cuda_oom_observer, without_dispatch_modes
from lightning_memtools.memory.history_recording import record
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.oom_errors import error_chain, requested_bytes
from lightning_memtools.memory.owned import OnDevice, bytes_on_device, on_device_of
from lightning_memtools.memory.readers import CudaReader, allocated_bytes, reader_for
from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.failure_facts import (
    FailureFacts,
    FailureMoment,
    LargestBatchBefore,
    MemoryAtBatchStart,
    MemoryGrowth,
    running_module,
    sizes_only,
    split_memory,
)

# User code may catch errors and try again, and run out of memory again while it cleans up.
_MOST_CAPTURED = 8
# As a share of the reserved memory. Smaller growth comes from batches of different sizes.
_LEAST_GROWTH = 0.05
# A batch that takes so many times the memory of the largest of at least so many before it is an odd one.
_LEAST_ODD = 1.5
_LEAST_BEFORE = 3
# A device with less free memory than both is nearly full. The handles of cuBLAS and cuDNN take up to some 100 MiB.
_LITTLE_SHARE, _LITTLE_BYTES = 0.1, 2**30

OOMObserver = Callable[[int, int, int, int], object]
"""Called with a device's index, the requested bytes, the capacity, and the free bytes."""

# torch's observers can be attached, but not detached: one per process is attached, and calls those in this list.
_listeners: list[OOMObserver] = []
_attached = False


def observe(device: torch.device, observer: OOMObserver) -> Callable[[], None] | None:
    """Have an observer called when the device runs out of memory, before the error unwinds.

    Returns:
        A function that detaches the observer; None if the device calls no observers.
    """
    virtual = VirtualDevice.current()
    if virtual is not None and device.type == "cpu":
        return virtual.observe_oom(observer).remove
    if device.type != "cuda" or not _attach():
        return None
    _listeners.append(observer)

    def remove() -> None:
        if observer in _listeners:
            _listeners.remove(observer)

    return remove


def _attach() -> bool:
    """Attach the process's one observer, if it is not attached yet, and return whether it is attached now."""
    global _attached  # noqa: PLW0603, see `_listeners`
    if not _attached:
        # Initialising CUDA makes the allocators that it is attached to.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        # Other allocators than torch's own (cudaMallocAsync, pluggable ones) raise: they call no observers.
        with suppress(RuntimeError):
            attach_cuda_oom_observer(_tell)
            _attached = True
    return _attached


def _tell(device: int, n_bytes: int, total: int, free: int) -> None:
    for listener in _listeners:
        # An error of a listener would replace the out-of-memory error.
        with suppress(Exception):
            listener(device, n_bytes, total, free)


class FailureCapture:
    """Follows one fit, validate, test or predict call, and captures facts in the moment that memory runs out.

    Args:
        device: The device that the run puts its tensors on.
        model: The model.
        place: Returns the present place in the run; stage, batch and phase are added here.
        optimizers: Returns the optimizers; none before they are configured.
        snapshot: Record the allocator's history.

    Attributes:
        device: As given.
        reader: Reads the device; None where it keeps no statistics.
        virtual: The reader, if it is a simulated device.
        on_device: Tells which tensors are on the device.
        snapshot: True if a recording was asked for.
        recording: The recording; None where there is none.
        batch: The batch that is running; None between batches.
        phase: Within a training batch "forward", "backward" or "optimizer step".
        evaluation_began: The time, on the recording's clock, at which the present evaluation began.
        batch_began: The time at which the present batch began; None where nothing is recorded, or between batches.
        is_reporting: True while a report is being made: running out of memory meanwhile is not captured.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        place: Callable[[], FailureMoment],
        optimizers: Callable[[], Sequence[Optimizer]],
        *,
        snapshot: bool,
    ) -> None:
        self.device = device
        self.reader: MemoryReader | None = reader_for(device)
        self.virtual = self.reader if isinstance(self.reader, VirtualDevice) else None
        self.on_device: OnDevice = lambda tensor: tensor.device.type == device.type
        if self.reader is not None:
            self.on_device = on_device_of(self.reader, device)
        self.snapshot = snapshot
        self.recording = record(self.reader) if snapshot else None
        self.batch: Any = None
        self.phase = ""
        self.evaluation_began: int | None = None
        self.batch_began: int | None = None
        self.is_reporting = False
        self._model, self._place, self._optimizers = model, place, optimizers
        self._stage = "setup"
        self._batch_idx: int | None = None
        self._first_batch: Any = None
        self._before: MemoryAtBatchStart | None = None
        # The first batch that began with the same owners of memory as the present one, and the number of batches since;
        # a stage's own first batch is left out.
        self._first_before: MemoryAtBatchStart | None = None
        self._n_since = 0
        # By stage: the largest batch that ran.
        self._largest: dict[str, LargestBatchBefore] = {}
        self._captured: deque[FailureFacts] = deque(maxlen=_MOST_CAPTURED)
        self._stop_observing = observe(device, self._observe)

    def stop(self) -> None:
        """Stop observing and recording. Idempotent."""
        if self._stop_observing is not None:
            self._stop_observing()
        if self.recording is not None:
            self.recording.stop()
        self.end_batch()

    # --- following the run

    def begin(self, stage: str) -> None:
        """Note that a stage begins, or continues after another."""
        self.end_batch()
        self._stage = stage
        self._first_batch = self._first_before = None
        self.evaluation_began = None if stage == "train" or self.recording is None else self.recording.now()

    def begin_batch(self, batch: Any, batch_idx: int, phase: str = "") -> None:
        """Note that a batch is on the device."""
        self.batch_began = None if self.recording is None else self.recording.now()
        self.batch, self._batch_idx, self.phase = batch, batch_idx, phase
        is_first = self._first_batch is None
        if is_first:
            self._first_batch = sizes_only(batch)
        if self.reader is None:
            return
        self._before = before = MemoryAtBatchStart(
            allocated_bytes(self.reader),
            bytes_on_device(tensors_in(batch), self.on_device, set()),
            had_gradients=any(p.grad is not None for p in self._model.parameters() if p.requires_grad),
            had_state=any(optimizer.state for optimizer in self._optimizers()),
        )
        first, self._n_since = self._first_before, self._n_since + 1
        if is_first:
            return  # libraries allocate their workspaces in this batch, and keep them
        if first is None or replace(first, allocated=before.allocated, inputs=before.inputs) != before:
            self._first_before, self._n_since = before, 0

    def end_batch(self) -> None:
        """Forget the batch, but for its size."""
        if self._before is not None:
            n_bytes, known = self._before.inputs, self._largest.get(self._stage)
            if known is None or n_bytes > known.n_bytes:
                known = LargestBatchBefore(n_bytes, sizes_only(self.batch), 0 if known is None else known.n_batches)
            self._largest[self._stage] = replace(known, n_batches=known.n_batches + 1)
        self.batch = self._batch_idx = self._before = self.batch_began = None
        self.phase = ""

    # --- when memory runs out

    def facts_of(self, exception: BaseException) -> FailureFacts:
        """Return the facts captured for the first of the errors that led to this one, or else those of now."""
        # Observers are only called for these: what was captured before an error of another kind is about another one.
        n_observed = sum(isinstance(error, torch.OutOfMemoryError) for error in error_chain(exception))
        if not self._captured or not n_observed:
            return self._capture(requested=requested_bytes(exception))
        return self._captured[-min(n_observed, len(self._captured))]

    def is_nearly_full(self) -> bool:
        """Return True if so little of the device is free that a library may not find room for its handle."""
        stats = None if self.reader is None else self.reader.stats()
        if stats is None or stats.capacity is None:
            return False
        used = max(stats.device_used or 0, stats.reserved or 0)
        return stats.capacity - used < min(_LITTLE_SHARE * stats.capacity, _LITTLE_BYTES)

    def first_facts(self) -> FailureFacts | None:
        """Return the facts that were captured first in the present step; None if no device reported a failure."""
        step = self._place().step
        return next((facts for facts in self._captured if facts.moment.step == step), None)

    def last_moment(self) -> str:
        """Return where memory ran out last; "" where it did not."""
        return str(self._captured[-1].moment) if self._captured else ""

    def _observe(self, _device: int, n_bytes: int, _total: int, free: int) -> None:
        if self.is_reporting:
            return
        self.is_reporting = True
        try:
            # A simulated device may run out of memory within a rule that runs on fake tensors: no copy shall be one.
            with without_dispatch_modes():
                self._captured.append(self._capture(requested=n_bytes, free=free))
        finally:
            self.is_reporting = False

    def _capture(self, *, requested: int | None = None, free: int | None = None) -> FailureFacts:
        place, reader = self._place(), self.reader
        phase = "" if place.hook else self.phase
        moment = replace(place, stage=self._stage, batch_idx=self._batch_idx, phase=phase)
        facts = FailureFacts(
            moment=moment,
            device=str(self.device) if reader is None else reader.name,
            requested=requested,
            free=free,
        )
        try:
            facts = _with_host(facts, self.device) if reader is None else self._with_device(facts, reader)
            is_own = self.batch is not None
            batch = sizes_only(self.batch) if is_own else self._first_batch
            return replace(facts, batch=batch, is_own_batch=is_own, module=running_module(self._model))
        except Exception as error:  # noqa: BLE001, what is known so far is worth a report, and the error must go on
            return replace(facts, problem=f"{type(error).__name__}: {error}")

    def _with_device(self, facts: FailureFacts, reader: MemoryReader) -> FailureFacts:
        """Add what the device's statistics tell."""
        stats, fraction, free, split, others = reader.stats(), _fraction(reader), facts.free, None, None
        if free is not None and stats.capacity is not None and fraction < 1:
            free = max(0, min(free, int(fraction * stats.capacity) - (stats.reserved or 0)))
        if stats.device_used is not None and stats.reserved is not None:
            others = max(stats.device_used - stats.reserved, 0)
        if stats.allocated is not None:
            split = split_memory(
                stats.allocated,
                self._model,
                self._optimizers(),
                self.on_device,
                batch=self.batch,
                before=self._before,
            )
        return replace(
            facts,
            free=free,
            stats=stats,
            used_by_others=others,
            fraction=fraction,
            split=split,
            grown=self._grown(stats),
            before=self._largest_before(),
        )

    def _largest_before(self) -> LargestBatchBefore | None:
        """Return the largest batch before this one, if this one is an odd one beside it."""
        known = self._largest.get(self._stage)
        if known is None or known.n_batches < _LEAST_BEFORE or self._before is None or not known.n_bytes:
            return None
        times = self._before.inputs / known.n_bytes
        return replace(known, times=times) if times >= _LEAST_ODD else None

    def _grown(self, stats: MemoryStats) -> MemoryGrowth | None:
        first, now, n_batches = self._first_before, self._before, self._n_since
        if first is None or now is None or not n_batches:
            return None
        n_bytes = (now.allocated - now.inputs) - (first.allocated - first.inputs)
        is_large = n_bytes > _LEAST_GROWTH * (stats.reserved or stats.allocated or 0)
        return MemoryGrowth(n_bytes, n_batches) if is_large else None


def _fraction(reader: MemoryReader) -> float:
    if isinstance(reader, VirtualDevice):
        return reader.settings.per_process_memory_fraction
    if isinstance(reader, CudaReader):
        return float(torch.cuda.get_per_process_memory_fraction(reader.index))
    return 1.0


def _with_host(facts: FailureFacts, device: torch.device) -> FailureFacts:
    """Add the size of the host's memory to the facts of a device that keeps no statistics."""
    if device.type != "cpu":
        return facts
    host = psutil.virtual_memory()
    return replace(facts, device="the host (cpu)", stats=MemoryStats(capacity=host.total), free=host.available)
