"""The memory figures of one fit, validate, test or predict call: scalars for the logs, and a summary at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.early_warnings import EarlyWarnings
from lightning_memtools.memory.host_memory import HostWatch
from lightning_memtools.memory.owned import Owned, on_device_of, owned_by
from lightning_memtools.memory.peaks import (
    STAGES,
    Phase,
    PhaseClock,
    PhaseWatch,
    Stage,
    StagePeak,
    StageWatch,
    peak_counter,
)
from lightning_memtools.memory.processes import in_words, other_gpu_processes
from lightning_memtools.memory.readers import CudaReader, host_rss_bytes
from lightning_memtools.memory.scalars import (
    composition_scalars,
    count_since,
    device_scalars,
    over_ranks,
    phase_scalars,
)
from lightning_memtools.memory.sizes import format_share, format_size, to_gib
from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.reporting.ranks import PATIENCE_S, RankPosts
from lightning_memtools.reporting.tables import Table, markdown_table


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """The peak memory of one run of the Trainer, such as a fit, as tables and remarks.

    Attributes:
        title: A line that names the device, its capacity, and the Trainer method that ran.
        peaks: The highest peak of each stage; with several ranks, the highest of any rank.
        capacity: The memory of the device in bytes; None if unknown.
        remarks: All other information, one line per remark.
    """

    title: str
    peaks: Mapping[Stage, StagePeak]
    capacity: int | None
    remarks: Sequence[str]

    def tables(self) -> list[Table]:
        """Return a table of the peaks by stage and, if known, a table of the highest peak by category of memory."""
        rows = [
            [stage, format_size(peak.allocated), format_size(peak.reserved), format_share(peak.reserved, self.capacity)]
            for stage in STAGES
            if (peak := self.peaks.get(stage)) is not None
        ]
        tables = [Table(["stage", "peak allocated", "peak reserved", "of device"], rows)] if rows else []
        known = [peak for peak in self.peaks.values() if peak.composition]
        if known:
            highest = max(known, key=lambda peak: peak.allocated or 0)
            parts = sorted((highest.composition or {}).items(), key=lambda part: -part[1])
            rows = [[part, format_size(size), format_share(size, highest.allocated)] for part, size in parts if size]
            tables.append(Table(["at the highest peak", "size", "share"], rows))
        return tables

    def markdown(self) -> str:
        """Return the whole summary as markdown, for the report file and the loggers."""
        remarks = "\n".join(f"- {line}" for line in self.remarks)
        return "\n\n".join([f"### {self.title}", *map(markdown_table, self.tables()), remarks]) + "\n"


NO_GPU = "No GPU: showing host memory. Wrap fit in VirtualDevice(...) or use memtools dry-run to see a GPU's."


class MemoryRun:
    """Measures the memory of one fit, validate, test or predict call on one rank.

    Args:
        device: The device of the model.
        reader: Reads the device's memory statistics; None if the device keeps none, so that only host memory is known.
        write: Writes scalars to the loggers; called with a dict from tags to values, and a training step.
        call: The name of the call, such as "fit".
        phases: Whether to measure forward, backward and optimizer step separately.
        has_trained: Whether the Trainer has trained before this call. If so, evaluation does not log the bytes per
            category (parameters, activations, ...), because training has used the same tags.

    Attributes:
        last_step: The training step of the last logged point.
    """

    def __init__(
        self,
        device: torch.device,
        reader: MemoryReader | None,
        write: Callable[[Mapping[str, float], int], None],
        *,
        call: str,
        phases: bool = False,
        has_trained: bool = False,
    ) -> None:
        self.call = call
        self.last_step = -1
        self._device, self._name = device, str(device) if reader is None else reader.name
        self._reader, self._write = reader, write
        self._has_trained = has_trained or call == "fit"
        self._posts = RankPosts("MemoryMonitor")
        self._host = HostWatch()
        self._is_training = False
        self._count_from_now()
        counter = None if reader is None else peak_counter(reader)
        self._stages = None if counter is None else StageWatch(counter)
        self._step_clock, self._clock = PhaseClock(), PhaseClock()
        self._phases = PhaseWatch(counter, clock=self._clock) if phases else None

    def _count_from_now(self) -> None:
        """Count allocation retries and out-of-memory errors from now on."""
        self._since = MemoryStats() if self._reader is None else self._reader.stats()
        self._early = EarlyWarnings(retries=self._since.alloc_retries or 0)

    @property
    def shortcoming(self) -> str:
        """A sentence that names the memory statistics that the device does not keep; "" if it keeps all."""
        if self._reader is None:
            is_cpu = self._device.type == "cpu"
            return NO_GPU if is_cpu else f"{self._name} keeps no memory statistics: host memory is logged."
        if self._since.peak_allocated is None:
            return f"{self._name} keeps no peaks: memory/<stage>/peak_* are not logged."
        return ""

    def begin_training(self, step: int, optimizers: Sequence[Optimizer], *, between_phases: Phase | None) -> None:
        """Begin to measure training. After backward or an optimizer step, the phase `between_phases` begins."""
        self.last_step = step - 1
        self._count_from_now()  # what trials of BatchSizeTuner have met is no part of training
        if self._phases is not None:
            self._phases.between = between_phases
            self._phases.follow(optimizers)
        self.enter("train")

    def enter(self, stage: Stage) -> None:
        """Begin to measure a stage, such as "val". If training is running, the measurement of training pauses."""
        self._is_training = self._is_training or stage == "train"
        self._time_steps(on=stage == "train")
        if self._stages is not None:
            self._stages.enter(stage)

    def leave(self, stage: Stage) -> None:
        """End a stage. If the stage has interrupted training, the measurement of training continues."""
        self._is_training = self._is_training and stage != "train"
        self._time_steps(on=self._is_training)
        if self._stages is not None:
            self._stages.leave(stage)

    def _time_steps(self, *, on: bool) -> None:
        self._step_clock.switch("step" if on else None)
        self._clock.switch("data" if on else None)

    def switch_phase(self, phase: Phase | None) -> None:
        """Begin a phase of the training step, such as "forward"; None stands for waiting for the next batch."""
        if self._phases is not None:
            self._phases.switch(phase)
            if phase is None:
                self._clock.switch("data")

    def leave_backward(self) -> None:
        """End the backward phase, and begin the phase that was passed to `begin_training` as `between_phases`."""
        if self._phases is not None:
            self._phases.switch(self._phases.between)

    def add_point(
        self,
        stage: Stage,
        step: int,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        batch: Any = None,
        epoch: int | None = None,
        warms_up: bool = False,
    ) -> list[str]:
        """Add a point to the logged curves, and return new warnings that memory may run out.

        Rank 0 writes the point once the scalars of all ranks have arrived. Nothing waits for the device, because the
        allocator's statistics are on the host.

        Args:
            stage: The stage that the point belongs to.
            step: The training step.
            model: The model; its part of the peak is logged.
            optimizers: The optimizers; their part of the peak is logged.
            batch: The batch; its part of the peak is logged. None if there is none.
            epoch: The epoch of training; None outside of training.
            warms_up: True in the first steps of the run, when growing memory is normal and gives no warning.
        """
        host, warnings = self._host.look(epoch=epoch, warms_up=warms_up)
        scalars = {"memory/host_rss_gib": to_gib(host_rss_bytes())} | (host.scalars() if host is not None else {})
        if stage == "train":
            scalars |= self._step_scalars(step)
        if self._stages is not None:
            point = self._stages.point(stage, self._owned_by(model, optimizers, batch))
            scalars |= device_scalars(stage, point, since=self._since)
            warnings += self._early.look(point, warms_up=warms_up)
            if stage == "train" or not self._has_trained:
                scalars |= composition_scalars(point)

        def write(parts: Sequence[dict[str, float] | None]) -> None:
            self._write(scalars if len(parts) == 1 else over_ranks([part or {} for part in parts], stage), step)

        self._posts.add(f"{stage} at step {step}", scalars, write, latest=self._peak_sizes())
        return warnings

    def _owned_by(self, model: nn.Module, optimizers: Sequence[Optimizer], batch: Any) -> Owned | None:
        """Return the memory of model, optimizers and batch; None if the device tracks it itself or not at all."""
        if self._reader is None or self._reader.composition_at_peak() is not None:
            return None
        return owned_by(model, optimizers, on_device_of(self._reader, self._device), inputs=batch)

    def _step_scalars(self, step: int) -> dict[str, float]:
        """Return the mean times per step and the phases' peak memory since the last point, as a dict by log tag."""
        n_steps, self.last_step = step - self.last_step, step
        elapsed = self._step_clock.lap_ms()
        peaks: dict[str, float] = {}
        if self._phases is not None:
            peaks, elapsed = phase_scalars(self._phases.point()), elapsed | self._clock.lap_ms()
        return peaks | {f"time/{phase}_ms": ms / n_steps for phase, ms in elapsed.items() if n_steps > 0}

    def last_scalars(self) -> dict[str, float]:
        """Return this rank's memory use since the last point, as a dict by log tag; empty if no stage is running."""
        stage = self._stages.running if self._stages is not None else None
        if self._stages is None or stage is None:
            return {}
        point = self._stages.point(stage)
        return device_scalars(stage, point, since=self._since) | composition_scalars(point)

    def write_arrived(self) -> None:
        """Write the points for which the scalars of all ranks have arrived."""
        self._posts.write_arrived()

    def summary(self, *, waits_for_ranks: bool, events: Iterable[str] = ()) -> MemorySummary:
        """Stop measuring, write the remaining points, and return a summary of the call.

        With several ranks, the summary on rank 0 has the highest peaks of any rank. With `waits_for_ranks`, rank 0
        waits a few seconds for the other ranks' final peaks. `events` are extra remarks to include.
        """
        self.close()
        by_rank = self._posts.finish(patience_s=PATIENCE_S if waits_for_ranks else 0.0, latest=self._peak_sizes())
        n_ranks = sum(theirs is not None for theirs in by_rank)
        peaks: Mapping[Stage, StagePeak] = {} if self._stages is None else self._stages.peaks
        peaks = _highest_peaks(by_rank) if n_ranks > 1 else peaks
        reader, now = self._reader, MemoryStats() if self._reader is None else self._reader.stats()
        # A simulated device's name contains the capacity.
        capacity = "" if now.capacity is None or (reader and reader.simulated) else f", {format_size(now.capacity)}"
        ranks = f", highest of {n_ranks} ranks" if n_ranks > 1 else ""
        remarks = [f"Host memory of this process: {format_size(host_rss_bytes())}."]
        retries, ooms = count_since(now.alloc_retries, self._since.alloc_retries), now.ooms or 0
        if retries is not None:
            remarks.append(f"Allocation retries: {retries}; out-of-memory errors: {ooms - (self._since.ooms or 0)}.")
        if isinstance(reader, CudaReader):
            remarks.append(f"Other processes on the device: {in_words(other_gpu_processes(reader.index))}.")
        title = f"{'Memory peaks' if peaks else 'Memory'} on {self._name}{capacity}{ranks}, during {self.call}"
        remarks += filter(None, (*events, self.shortcoming))
        return MemorySummary(title, peaks, now.capacity, remarks)

    def close(self) -> None:
        """Stop measuring. Idempotent."""
        for watch in (self._phases, self._stages):
            if watch is not None:
                watch.close()

    def _peak_sizes(self) -> dict[str, list[int | None]]:
        peaks = {} if self._stages is None else self._stages.peaks
        return {stage: [peak.allocated, peak.reserved] for stage, peak in peaks.items()}


def _highest_peaks(by_rank: Sequence[Mapping[str, Sequence[int | None]] | None]) -> dict[Stage, StagePeak]:
    """Return the highest peak of each stage on any rank. `by_rank` has one dict of peak sizes by stage per rank."""
    merged: dict[Stage, StagePeak] = {}
    for stage in STAGES:
        known = [sizes[stage] for sizes in by_rank if sizes is not None and stage in sizes]
        allocated, reserved = ([n_bytes for size in known if (n_bytes := size[i]) is not None] for i in (0, 1))
        if allocated:
            merged[stage] = StagePeak(max(allocated), max(reserved, default=None))
    return merged
