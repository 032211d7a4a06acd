"""What OOMReport knows of a run while it goes on, and captures when memory runs out."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import training_step
from lightning_memtools.memory.oom_errors import error_chain, requested_bytes
from lightning_memtools.memory.owned import OnDevice, on_device_of
from lightning_memtools.memory.readers import CudaReader, allocated_bytes, reader_for
from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.facts import Facts, Growth, Moment, running_module, sizes_only
from lightning_memtools.oom.observer import observe
from lightning_memtools.oom.recording import record
from lightning_memtools.oom.split import Before, KnowsItsComposition, Split, split_by_device, split_by_walking

# User code may catch errors and try again, and fail while it cleans up.
_MOST_CAPTURED = 8
# Of what is reserved. Less than that comes and goes with the sizes of batches.
_WORTH_NAMING = 0.05


class Watch:
    """Follows one fit, validate, test or predict call, and captures facts in the moment that memory runs out.

    Args:
        trainer: Whose call it is.
        pl_module: Its model.
        snapshot: Whether to record what is asked of the allocator.

    Attributes:
        reader: What reads the device; None where it keeps no statistics.
        virtual: The reader, if it is a simulated device.
        on_device: Which tensors are the device's.
        snapshot: Whether a recording was asked for.
        recording: The recording; None where there is none.
        phase: Within a training batch forward, backward or optimizer step.
        evaluation_began: When the evaluation that goes on began, on the recording's clock.
        is_reporting: Whether a report is being made: what runs out meanwhile is not captured.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, *, snapshot: bool) -> None:
        device = trainer.strategy.root_device
        self.reader: MemoryReader | None = reader_for(device)
        self.virtual = self.reader if isinstance(self.reader, VirtualDevice) else None
        self.on_device = _on_device(self.reader, device)
        self.snapshot = snapshot
        self.recording = record(self.reader) if snapshot else None
        self.phase = ""
        self.evaluation_began: int | None = None
        self.is_reporting = False
        self._trainer = trainer
        self._model = pl_module
        self._stage = "setup"
        self._batch: Any = None
        self._batch_idx: int | None = None
        self._first_batch: Any = None
        self._before: Before | None = None
        # Of the first batch that began with the same owners of memory as the present one, and how many began since.
        self._first_before: Before | None = None
        self._n_since = 0
        self._captured: deque[Facts] = deque(maxlen=_MOST_CAPTURED)
        self._stop_observing = observe(device, self._observe)

    def stop(self) -> None:
        """Listen and record no more. Twice does no harm."""
        if self._stop_observing is not None:
            self._stop_observing()
        if self.recording is not None:
            self.recording.stop()
        self.end_batch()

    # --- following the run

    def begin(self, stage: str) -> None:
        """A stage begins, or goes on after another."""
        self._stage = stage
        self.end_batch()
        self._first_batch = self._first_before = None
        is_evaluation = stage != "train" and self.recording is not None
        self.evaluation_began = self.recording.now() if is_evaluation and self.recording is not None else None

    def begin_batch(self, batch: Any, batch_idx: int, phase: str = "") -> None:
        """A batch is on the device."""
        self._batch, self._batch_idx, self.phase = batch, batch_idx, phase
        if self._first_batch is None:
            self._first_batch = sizes_only(batch)
        if self.reader is not None:
            self._before = before = Before(
                allocated_bytes(self.reader),
                had_gradients=any(p.grad is not None for p in self._model.parameters() if p.requires_grad),
                had_state=any(optimizer.state for optimizer in self._trainer.optimizers),
            )
            first, self._n_since = self._first_before, self._n_since + 1
            if first is None or replace(first, allocated=before.allocated) != before:
                self._first_before, self._n_since = before, 0

    def end_batch(self) -> None:
        """The batch is let go."""
        self._batch = self._batch_idx = self._before = None
        self.phase = ""

    # --- when memory runs out

    def facts_of(self, exception: BaseException) -> Facts:
        """What was captured for the first of the errors that led to this one, or can be captured still."""
        # Only these are told to an observer: what it heard before another kind of error was about something else.
        n_observed = sum(isinstance(error, torch.OutOfMemoryError) for error in error_chain(exception))
        if not self._captured or not n_observed:
            return self._capture(requested=requested_bytes(exception))
        return self._captured[-min(n_observed, len(self._captured))]

    def last_moment(self) -> str:
        """Where memory ran out last; "" where it did not."""
        return str(self._captured[-1].moment) if self._captured else ""

    def _observe(self, device: int, n_bytes: int, total: int, free: int) -> None:
        del device, total
        if self.is_reporting:
            return
        self.is_reporting = True
        try:
            self._captured.append(self._capture(requested=n_bytes, free=free))
        finally:
            self.is_reporting = False

    def _capture(self, *, requested: int | None = None, free: int | None = None) -> Facts:
        facts = self._where(requested, free)
        try:
            if self.reader is None:
                facts = _with_host(facts, self._trainer.strategy.root_device)
            else:
                stats = self.reader.stats()
                known = stats.device_used is not None and stats.reserved is not None
                others = max((stats.device_used or 0) - (stats.reserved or 0), 0) if known else None
                facts = replace(
                    facts,
                    stats=stats,
                    used_by_others=others,
                    fraction=_fraction(self.reader),
                    split=self._split(stats),
                    grown=self._grown(stats),
                )
            is_own = self._batch is not None
            batch = sizes_only(self._batch) if is_own else self._first_batch
            return replace(facts, batch=batch, is_own_batch=is_own, module=running_module(self._model))
        except Exception as error:  # noqa: BLE001, what is known so far is worth a report, and the error must go on
            return replace(facts, problem=f"{type(error).__name__}: {error}")

    def _where(self, requested: int | None, free: int | None) -> Facts:
        trainer, reader = self._trainer, self.reader
        moment = Moment(
            self._stage,
            training_step(trainer),
            self._batch_idx,
            self.phase,
            trainer.global_rank,
            trainer.world_size,
        )
        return Facts(
            moment=moment,
            device=str(trainer.strategy.root_device) if reader is None else reader.name,
            simulated=reader is not None and reader.simulated,
            requested=requested,
            free=free,
        )

    def _split(self, stats: MemoryStats) -> Split | None:
        if stats.allocated is None:
            return None
        walked = split_by_walking(
            stats.allocated,
            self._model,
            self._trainer.optimizers,
            self.on_device,
            batch=self._batch,
            before=self._before,
        )
        if not isinstance(self.reader, KnowsItsComposition):
            return walked
        return split_by_device(self.reader, self._model, older=None if self._before is None else walked.older)

    def _grown(self, stats: MemoryStats) -> Growth | None:
        first, now, n_batches = self._first_before, self._before, self._n_since
        if first is None or now is None or not n_batches:
            return None
        n_bytes = now.allocated - first.allocated
        return (
            Growth(n_bytes, n_batches) if n_bytes > _WORTH_NAMING * (stats.reserved or stats.allocated or 0) else None
        )


def _fraction(reader: MemoryReader) -> float:
    if isinstance(reader, VirtualDevice):
        return reader.settings.per_process_memory_fraction
    if isinstance(reader, CudaReader):
        return float(torch.cuda.get_per_process_memory_fraction(reader.index))
    return 1.0


def _with_host(facts: Facts, device: torch.device) -> Facts:
    """On a device that keeps no statistics; of the host at least its size is known."""
    if device.type != "cpu":
        return facts
    host = psutil.virtual_memory()
    return replace(facts, device="the host (cpu)", stats=MemoryStats(capacity=host.total), free=host.available)


def _on_device(reader: MemoryReader | None, device: torch.device) -> OnDevice:
    if reader is not None:
        return on_device_of(reader, device)
    return lambda tensor: tensor.device.type == device.type
