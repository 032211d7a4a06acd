"""The memory figures of one fit, validate, test or predict call: scalars for the logs, and a summary at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.early_warnings import EarlyWarnings
from lightning_memtools.memory.gpu_load import GpuLoad
from lightning_memtools.memory.history_recording import recorded_snapshot
from lightning_memtools.memory.host_memory import HostMemory
from lightning_memtools.memory.owned import Owned, on_device_of, owned_by
from lightning_memtools.memory.peaks import (
    STAGES,
    MemoryPoint,
    PeakWindow,
    Phase,
    PhaseClock,
    PhaseWatch,
    Stage,
    StagePeak,
    StageWatch,
    peak_counter,
)
from lightning_memtools.memory.processes import GpuProcess, other_gpu_processes
from lightning_memtools.memory.readers import CudaReader, host_rss_bytes
from lightning_memtools.memory.scalars import (
    batch_scalars,
    composition_scalars,
    count_since,
    device_scalars,
    over_ranks,
    phase_scalars,
)
from lightning_memtools.memory.sizes import to_gib
from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.reporting.loggers import Charts
from lightning_memtools.reporting.memory_summary import MemorySummary
from lightning_memtools.reporting.ranks import PATIENCE_S, RankPoints

NO_GPU = "No GPU: showing host memory. Wrap fit in VirtualDevice(...) or use memtools dry-run to see a GPU's."


WriteScalars = Callable[[Mapping[str, float], int], None]
"""Writes scalars, by tag, at a step."""


class MemoryRun:
    """Measures one fit, validate, test or predict call on one rank.

    Args:
        reader: Reads the device's statistics; None where it keeps none, and only host memory is known.
        call: The name of the call, such as "fit".
        device: The device's name, for the summary.
        reset_peaks: Whether the device's peak counters may be reset.
        phases: Whether to measure the phases of a training step.
        per_rank: Whether to return every rank's own values too.
        eval_batches: Whether each evaluation batch has its own point.
        load: Samples the GPU's load; None for no such figures.
        has_trained: Whether the Trainer has trained before this call. Training and evaluation share the tags of the
            composition, which then belong to training alone.

    Attributes:
        last_step: The training step of the last point.
        host: Host memory, for the next point; None where it was not read since the last one.
    """

    def __init__(
        self,
        reader: MemoryReader | None,
        *,
        call: str,
        device: str,
        reset_peaks: bool = True,
        phases: bool = False,
        per_rank: bool = False,
        eval_batches: bool = False,
        has_trained: bool = False,
        load: GpuLoad | None = None,
    ) -> None:
        self.call = call
        self.device = device
        self.last_step = -1
        self.host: HostMemory | None = None
        self._reader = reader
        self._per_rank = per_rank
        self._has_trained = has_trained or call == "fit"
        self._points = RankPoints("MemoryMonitor")
        self._training = False
        self._input_bytes = 0
        self._step_time = PhaseClock()
        self._since = MemoryStats()
        self._stage_watch: StageWatch | None = None
        self._load = load
        self._clock = PhaseClock()
        self._phase_watch: PhaseWatch | None = PhaseWatch(None, clock=self._clock) if phases else None
        self._batch_window: PeakWindow | None = None
        if reader is not None:
            self._since = reader.stats()
            self._early = EarlyWarnings(
                retries=self._since.alloc_retries or 0, snapshot=partial(recorded_snapshot, reader)
            )
            self._counter = peak_counter(reader)
            self._stage_watch = StageWatch(self._counter, leave_counter_alone=not reset_peaks)
            if phases:
                self._phase_watch = PhaseWatch(self._counter, leave_counter_alone=not reset_peaks, clock=self._clock)
            if eval_batches:
                self._batch_window = self._counter.open(leave_counter_alone=not reset_peaks)

    @property
    def shortcoming(self) -> str:
        """A sentence about the statistics that the device lacks; empty if it lacks none."""
        if self._reader is None:
            plain_cpu = self.device.startswith("cpu")  # NO_GPU is said once per process, not in each summary
            return "" if plain_cpu else f"{self.device} keeps no memory statistics: host memory is logged."
        if self._since.peak_allocated is None:
            return f"{self.device} keeps no peaks: memory/<stage>/peak_* are not logged."
        return ""

    def charts(self, *, validates: bool) -> Charts:
        """Return the charts of this call's curves; `validates` says whether there is a val stage."""
        if self._reader is None:
            return {"memory": {"host (GiB)": ["memory/(host_rss|host/(process|unique|workers|shared))_gib"]}}
        stages = {"fit": ("train", "val") if validates else ("train",), "validate": ("val",)}.get(
            self.call, (self.call,)
        )
        charts = {f"{stage}: allocated and reserved (GiB)": [f"memory/{stage}/(peak_)?(allocated|reserved)_gib"]
                  for stage in stages}  # fmt: skip
        charts["device: capacity and use (GiB)"] = ["memory/(capacity|device_used)_gib"]
        if self._since.peak_allocated is not None:
            charts["composition at the peak (GiB)"] = ["memory/composition/[a-z]+_gib"]
        if self._phase_watch is not None:
            charts["train: peak by phase (GiB)"] = ["memory/train/peak_(forward|backward|optimizer)_gib"]
        if self._per_rank:
            charts["train: peak by rank (GiB)"] = [r"memory/train/peak_allocated_gib/rank\d+"]
        return {"memory": charts}

    def leave_out(self, *, alloc_retries: int, ooms: int) -> None:
        """Do not count events that happened outside of the run."""
        self._since = replace(
            self._since,
            alloc_retries=(self._since.alloc_retries or 0) + alloc_retries,
            ooms=(self._since.ooms or 0) + ooms,
        )
        if self._stage_watch is not None:
            self._early.leave_out(alloc_retries)

    def begin_training(self, step: int, optimizers: Sequence[Optimizer], *, between_phases: Phase | None) -> None:
        """Begin the train stage at a training step; `PhaseWatch` describes `between_phases`."""
        self.last_step = step - 1
        if self._phase_watch is not None:
            self._phase_watch.between = between_phases
            self._phase_watch.follow(optimizers)
        self.enter("train")

    def enter(self, stage: Stage) -> None:
        """Begin a stage; training, if it was running, is interrupted."""
        if stage == "train":
            self._training = True
            self._step_time.switch("step")
            self._clock.switch("data")
        else:
            self._step_time.switch(None)
            self._clock.switch(None)
            if self._batch_window is not None:
                self._batch_window.resume()
        if self._stage_watch is not None:
            self._stage_watch.enter(stage)

    def leave(self, stage: Stage) -> None:
        """End a stage; training, if it was interrupted, goes on."""
        if stage == "train":
            self._training = False
            self._step_time.switch(None)
            self._clock.switch(None)
        else:
            if self._training:
                self._step_time.switch("step")
                self._clock.switch("data")
            if self._batch_window is not None:
                self._batch_window.close()
        if self._stage_watch is not None:
            self._stage_watch.leave(stage)

    def switch_phase(self, phase: Phase | None) -> None:
        """Begin a phase of the training step; with None, the wait for the next batch's data begins."""
        if self._phase_watch is not None:
            self._phase_watch.switch(phase)
            if phase is None:
                self._clock.switch("data")

    def leave_backward(self) -> None:
        """End the backward phase."""
        if self._phase_watch is not None:
            self._phase_watch.switch(self._phase_watch.between)

    def owned_by(
        self, model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, batch: Any = None
    ) -> Owned | None:
        """Return the memory that has an owner now; None if the device itself knows the composition of its peaks.

        Nothing waits for the device: sizes and identities of storages are known to the host.
        """
        if self._reader is None or self._reader.composition_at_peak() is not None:
            return None
        owned = owned_by(model, optimizers, on_device_of(self._reader, device), inputs=batch)
        if batch is not None:
            self._input_bytes = owned.by_category["inputs"]
        # At an epoch's end the last batch is gone; when memory was highest there was one.
        return replace(owned, by_category={**owned.by_category, "inputs": self._input_bytes})

    def add_training_point(self, step: int, write: WriteScalars, owned: Owned | None = None) -> list[str]:
        """Add a training point, as `add_point` does."""
        elapsed_ms = self._step_time.lap_ms().get("step", 0.0)
        n_steps = step - self.last_step
        extra = {"time/step_ms": elapsed_ms / n_steps} if n_steps > 0 else {}
        self.last_step = step
        if self._phase_watch is not None:
            extra |= phase_scalars(self._phase_watch.point())
            times = self._clock.lap_ms() if n_steps > 0 else {}
            extra |= {f"time/{phase}_ms": elapsed / n_steps for phase, elapsed in times.items()}
        return self.add_point("train", step, write, owned, extra)

    def last_scalars(self) -> dict[str, float]:
        """Return the scalars of this rank for the time since the last point; empty where no stage is running."""
        stage = self._stage_watch.running if self._stage_watch is not None else None
        if self._stage_watch is None or stage is None:
            return {}
        point = self._stage_watch.point(stage)
        return device_scalars(stage, point, since=self._since) | composition_scalars(point)

    def add_point(
        self,
        stage: Stage,
        step: int,
        write: WriteScalars,
        owned: Owned | None = None,
        extra: dict[str, float] | None = None,
    ) -> list[str]:
        """Add a point, and return new warnings of what comes before running out of memory.

        On rank 0, `write` gets the scalars over all ranks once those of every rank have arrived.

        Args:
            stage: The stage that the point belongs to.
            step: The training step.
            write: Writes the scalars.
            owned: The memory that has an owner now (`owned_by`), for the composition of the peak.
            extra: More scalars of this rank.
        """
        scalars = {"memory/host_rss_gib": to_gib(host_rss_bytes()), **(extra or {})}
        warnings: list[str] = []
        if self._load is not None:
            scalars |= self._load.scalars()
            if self._load.problem:
                warnings.append(f"load=True: no device/* is logged. {self._load.problem}.")
                self._load = None
        if self.host is not None:
            scalars |= self.host.scalars()
            self.host = None
        if self._stage_watch is not None:
            point = self._stage_watch.point(stage, owned)
            scalars |= device_scalars(stage, point, since=self._since)
            warnings += self._early.look(point)
            if stage == "train" or not self._has_trained:
                scalars |= composition_scalars(point)

        def merge(parts: Sequence[dict[str, float] | None]) -> None:
            merged = over_ranks([part or {} for part in parts], stage, per_rank=self._per_rank)
            write(scalars if len(parts) == 1 else merged, step)

        self._points.add(f"{stage} at step {step}", scalars, merge, extra=self._peak_sizes())
        return warnings

    def write_arrived(self) -> None:
        """Write the points for which all ranks' scalars have arrived since."""
        self._points.write_arrived()

    def batch_point(self, stage: Stage) -> dict[str, float]:
        """Return the scalars of an evaluation batch, of this rank alone.

        Ranks may have different numbers of evaluation batches, so nothing here may wait for another rank.
        """
        window = self._batch_window
        if window is None:
            return {}
        point = MemoryPoint(self._counter.fold(), window.allocated, window.reserved, window.composition)
        window.restart()
        return batch_scalars(stage, point)

    def summary(self, *, waits_for_ranks: bool) -> MemorySummary:
        """Stop measuring, write the points that are left, and return the summary of the call.

        With several ranks, rank 0's has the highest peaks of all of them. A rank whose last figures have not arrived
        within a few seconds, or at once where `waits_for_ranks` is False, counts with those of its last point.
        """
        self.close()
        by_rank = self._points.finish(patience_s=PATIENCE_S if waits_for_ranks else 0.0, extra=self._peak_sizes())
        peaks = self._stage_watch.peaks if self._stage_watch is not None else {}
        ranks = sum(theirs is not None for theirs in by_rank)
        if ranks > 1:
            peaks = _highest_peaks(by_rank)
        now = self._reader.stats() if self._reader is not None else MemoryStats()
        return MemorySummary(
            device=self.device,
            call=self.call,
            simulated=self._reader is not None and self._reader.simulated,
            peaks=peaks,
            capacity=now.capacity,
            alloc_retries=count_since(now.alloc_retries, self._since.alloc_retries),
            ooms=count_since(now.ooms, self._since.ooms),
            host_rss=host_rss_bytes(),
            processes=self._other_processes(),
            ranks=ranks,
            note=self.shortcoming,
        )

    def close(self) -> None:
        """Stop measuring. Idempotent."""
        if self._load is not None:
            self._load.stop()
        if self._batch_window is not None:
            self._batch_window.close()
        if self._phase_watch is not None:
            self._phase_watch.close()
        if self._stage_watch is not None:
            self._stage_watch.close()

    def _peak_sizes(self) -> dict[str, list[int | None]]:
        peaks = {} if self._stage_watch is None else self._stage_watch.peaks
        return {stage: [peak.allocated, peak.reserved] for stage, peak in peaks.items()}

    def _other_processes(self) -> Sequence[GpuProcess] | str | None:
        if isinstance(self._reader, CudaReader):
            return other_gpu_processes(self._reader.index)
        return None


def _highest_peaks(by_rank: Sequence[Mapping[str, Sequence[int | None]] | None]) -> dict[Stage, StagePeak]:
    """Return the highest peaks of any rank; without the composition, which belongs to a single rank."""
    merged: dict[Stage, StagePeak] = {}
    for stage in STAGES:
        known = [sizes[stage] for sizes in by_rank if sizes is not None and stage in sizes]
        allocated, reserved = ([n_bytes for size in known if (n_bytes := size[i]) is not None] for i in (0, 1))
        if allocated:
            merged[stage] = StagePeak(max(allocated), max(reserved, default=None))
    return merged
