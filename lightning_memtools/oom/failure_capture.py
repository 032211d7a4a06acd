"""Follows a run, and captures the facts when memory runs out, before the error unwinds the stack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools._torch import attach_cuda_oom_observer, without_dispatch_modes
from lightning_memtools.memory.history_recording import record
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.oom_errors import error_chain, requested_bytes
from lightning_memtools.memory.owned import OnDevice, bytes_on_device, on_device_of, owned_by
from lightning_memtools.memory.readers import CudaReader, allocated_and_reserved, reader_for
from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.failure_facts import (
    BatchesBefore,
    FailureFacts,
    FailureMoment,
    MemoryAtBatchStart,
    MemoryGrowth,
    off_device,
    split_memory,
    variables_of_step,
)

# As a share of the reserved memory. Smaller growth comes from batches of different sizes.
_LEAST_GROWTH = 0.05
# A stack of each allocation may take a quarter of a step's time on the host. Stacks are recorded where memory may run
# out: in the first batches of a stage, and while more than half of it is reserved.
_BATCHES_WITH_STACKS = 20

OOMObserver = Callable[[int, int, int, int], object]
"""Called with a device's index, the requested bytes, the capacity, and the free bytes."""

# torch's observers can be attached, but not detached: one per process is attached, and calls those in this list.
_listeners: list[OOMObserver] = []
_attached = False


def observe(device: torch.device, observer: OOMObserver) -> Callable[[], None] | None:
    """Register an observer to call when the device runs out of memory, before the stack unwinds.

    Returns:
        A function that removes the observer; None if the device does not support observers.
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
    """Attach this process's observer of CUDA out-of-memory errors, once. Return False if it cannot be attached."""
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
    """Follows one fit, validate, test or predict call, and records the state of memory when it runs out.

    Args:
        device: The device that the run puts its tensors on.
        model: The model.
        place: Returns the current stage, step and rank of the run; this class adds batch and phase.
        optimizers: Returns the optimizers; none before they are configured.
        snapshot: Whether to record the allocator's history.

    Attributes:
        reader: Reads the device's memory statistics; None if it has none.
        virtual: The VirtualDevice, if the device is simulated; else None.
        on_device: Returns whether a tensor is on the device.
        recording: The recording of the allocator's history; None if there is none.
        batch: The batch that is running; None between batches.
        phase: Within a training batch "forward", "backward" or "optimizer step".
        evaluation_began: The time, on the recording's clock, at which the latest evaluation began.
        batch_began: The time when the current batch began; None if nothing is recorded, or between batches.
        captured: The facts of the first failure in the current step; None if no device reported a failure.
        is_reporting: True while a report is being made; no failure is captured during that time.
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
        self.recording = record(self.reader) if snapshot else None
        self.batch: Any = None
        self.phase = ""
        self.evaluation_began: int | None = None
        self.batch_began: int | None = None
        self.is_reporting = False
        self.captured: FailureFacts | None = None
        self._model, self._place, self._optimizers = model, place, optimizers
        self._stage, self._n_batches = "", 0
        self._batch_idx: int | None = None
        self._before: MemoryAtBatchStart | None = None
        # By the owners of memory that there were: the first batch, but for the stage's own first one, and its number.
        self._first: dict[tuple[bool, bool], tuple[MemoryAtBatchStart, int]] = {}
        self._ran: defaultdict[str, BatchesBefore] = defaultdict(BatchesBefore)  # by stage
        stats = MemoryStats() if self.reader is None else self.reader.stats()
        capacity = stats.capacity or 0
        self._scarce_from = min(int(_fraction(self.reader) * capacity), capacity - stats.used_by_others) // 2
        self._stop_observing = observe(device, self._observe)

    def stop(self) -> None:
        """Stop observing and recording. Idempotent."""
        if self._stop_observing is not None:
            self._stop_observing()
        if self.recording is not None:
            self.recording.stop()
        self.batch = None

    # --- following the run

    def begin_evaluation(self) -> None:
        """Record the time at which an evaluation begins."""
        self.evaluation_began = None if self.recording is None else self.recording.now()

    def begin_batch(self, stage: str, batch: Any, batch_idx: int, phase: str = "") -> None:
        """Record the batch, and how much memory is allocated before its step."""
        if stage != self._stage:
            self._stage, self._n_batches, self._first = stage, 0, {}
        self.batch_began = None if self.recording is None else self.recording.now()
        self.batch, self._batch_idx, self.phase, self.captured = batch, batch_idx, phase, None
        self._n_batches += 1
        if self.reader is None:
            return
        allocated, reserved = allocated_and_reserved(self.reader)
        inputs = bytes_on_device(tensors_in(batch), self.on_device, set())
        if self.recording is not None:
            is_first = self._ran[stage].n < _BATCHES_WITH_STACKS
            self.recording.want_stacks(is_first or reserved > self._scarce_from)
        self._before = before = MemoryAtBatchStart(
            allocated,
            inputs,
            had_gradients=any(p.grad is not None for p in self._model.parameters() if p.requires_grad),
            had_state=any(optimizer.state for optimizer in self._optimizers()),
        )
        if self._n_batches > 1:  # libraries allocate their workspaces in the first batch, and keep them
            self._first.setdefault((before.had_gradients, before.had_state), (before, self._n_batches))

    def end_batch(self) -> None:
        """Record the sizes of the batch, and drop the reference to it."""
        self._ran[self._stage].add(self.batch)
        self.batch = self._batch_idx = self._before = self.batch_began = None
        self.phase = ""

    # --- when memory runs out

    def facts_of(self, error: BaseException) -> FailureFacts:
        """Return the facts captured when this step first ran out of memory. If there are none, capture facts now."""
        # Observers are only called for these: what was captured before an error of another kind is about another one.
        is_observed = any(isinstance(cause, torch.OutOfMemoryError) for cause in error_chain(error))
        if self.captured is None or not is_observed:
            return self._capture(requested=requested_bytes(error))
        return self.captured

    def _observe(self, _device: int, n_bytes: int, _total: int, free: int) -> None:
        # The facts of a step outlive it, for OOMRecovery's report on it.
        is_first = self.captured is None or self.captured.moment.batch_idx != self._batch_idx
        if self.is_reporting or not is_first:
            return
        # An error here would replace the out-of-memory error. A simulated device may run out of memory within a rule
        # that runs on fake tensors: no copy shall be one.
        with suppress(Exception), without_dispatch_modes():
            self.captured = self._capture(requested=n_bytes, free=free)

    def _capture(self, *, requested: int | None, free: int | None = None) -> FailureFacts:
        place, reader = self._place(), self.reader
        stage, phase = (place.stage if self._stage else "setup"), ("" if place.hook else self.phase)
        facts = FailureFacts(
            moment=replace(place, stage=stage, batch_idx=self._batch_idx, phase=phase),
            device=str(self.device) if reader is None else reader.name,
            requested=requested,
            free=free,
            batch=None if self.batch is None else off_device(self.batch, with_values=True),
        )
        if reader is None:
            return facts
        owned = owned_by(self._model, self._optimizers(), self.on_device, inputs=self.batch).storages
        stats, fraction, split = reader.stats(), _fraction(reader), None
        if free is not None and stats.capacity is not None and fraction < 1:
            free = max(0, min(free, int(fraction * stats.capacity) - (stats.reserved or 0)))
        if stats.allocated is not None:
            owners = (self._model, self._optimizers(), self.on_device)
            split = split_memory(stats.allocated, *owners, batch=self.batch, before=self._before)
        return replace(
            facts,
            free=free,
            stats=stats,
            used_by_others=None if None in {stats.device_used, stats.reserved} else stats.used_by_others,
            fraction=fraction,
            split=split,
            grown=self._grown(stats),
            before=replace(self._ran[self._stage]),
            variables=variables_of_step(self.on_device, {*owned}),
        )

    def _grown(self, stats: MemoryStats) -> MemoryGrowth | None:
        now = self._before
        if now is None or (now.had_gradients, now.had_state) not in self._first:
            return None
        first, number = self._first[now.had_gradients, now.had_state]
        n_bytes, n_batches = (now.allocated - now.inputs) - (first.allocated - first.inputs), self._n_batches - number
        is_large = n_bytes > _LEAST_GROWTH * (stats.reserved or stats.allocated or 0)
        return MemoryGrowth(n_bytes, n_batches) if is_large else None


def _fraction(reader: MemoryReader | None) -> float:
    if isinstance(reader, VirtualDevice):
        return reader.settings.per_process_memory_fraction
    if isinstance(reader, CudaReader):
        return float(torch.cuda.get_per_process_memory_fraction(reader.index))
    return 1.0
