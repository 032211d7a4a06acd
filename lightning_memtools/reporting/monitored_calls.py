"""The calls of a Trainer that MemoryMonitor watches: points and summaries of fit, validate, test and predict."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import callbacks_of, is_accumulating, prepared_loaders, training_step
from lightning_memtools.memory.allocator import write_snapshot
from lightning_memtools.memory.host_memory import HostWatch
from lightning_memtools.memory.peaks import Phase, Stage
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.step_snapshot import StepSnapshot
from lightning_memtools.reporting.carried_device import CarriedDevice, put_on_device
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import NO_RUN, NotWritten, report_directory, write_file, write_report_or_warn
from lightning_memtools.reporting.loggers import Charts, is_due, log_scalars, log_text, write_layout
from lightning_memtools.reporting.memory_run import NO_GPU, MemoryRun


class MonitoredCalls:
    """Watches one call of the Trainer after the other. The arguments are those of MemoryMonitor."""

    def __init__(
        self,
        *,
        every_n_steps: int | None,
        phases: bool,
        per_rank: bool,
        eval_batches: bool,
        reset_peaks: bool,
        snapshot_at_step: int | None,
    ) -> None:
        if snapshot_at_step is not None and not is_count(snapshot_at_step, least=0):
            raise ValueError(
                f"snapshot_at_step={snapshot_at_step!r} is no training step. Give a number from 0 upwards."
            )
        self._snapshot_at_step = snapshot_at_step
        self._step_snapshot: StepSnapshot | None = None
        self._every_n_steps = every_n_steps
        self._phases = phases
        self._per_rank = per_rank
        self._eval_batches = eval_batches
        self._reset_peaks = reset_peaks
        self._run: MemoryRun | None = None
        self._directory: Path | NotWritten = NO_RUN
        self._device = torch.device("cpu")
        self._sanity_check_began = 0.0
        self._carried = CarriedDevice()
        # TensorBoard drops the later points of a tag that comes again at the same or an earlier step. So these counts
        # go on over all calls of the Trainer.
        self._host = HostWatch()
        self._n_batches: dict[Stage, int] = {}
        self._summary_step = -1

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_run": None, "_step_snapshot": None}  # they observe this process

    def charts(self, trainer: Trainer) -> Charts:
        """Return the charts of the call's curves."""
        return self._running().charts(validates=trainer.enable_validation)

    def leave_out(self, *, alloc_retries: int, ooms: int) -> None:
        """Leave events of a trial out of the counts."""
        if self._run is not None:
            self._run.leave_out(alloc_retries=alloc_retries, ooms=ooms)

    def begin(self, trainer: Trainer, call: str) -> None:
        """Find the device, and warn if it keeps no statistics or no peaks."""
        self._stop()
        self._carried.enter()
        self._device = trainer.strategy.root_device
        reader = reader_for(self._device)
        self._run = MemoryRun(
            reader,
            call=TrainerFn(call).value,  # an enum, which prints as "TrainerFn.FITTING"
            device=reader.name if reader else str(self._device),
            reset_peaks=self._reset_peaks,
            phases=self._phases and call == "fit",
            per_rank=self._per_rank,
            eval_batches=self._eval_batches,
            has_trained=training_step(trainer) > 0,
        )
        self._directory = report_directory(trainer)
        if trainer.is_global_zero and self._run.shortcoming:
            warnings.warn(self._run.shortcoming, stacklevel=3)
        if trainer.is_global_zero and reader is None and self._device.type == "cpu":
            _say_that_there_is_no_gpu()

    def begin_fit(self, trainer: Trainer, model: LightningModule) -> None:
        """Write the layout of TensorBoard's custom scalars."""
        put_on_device(trainer, model)
        write_layout(trainer)

    def begin_sanity_check(self, trainer: Trainer, model: LightningModule) -> None:
        """Count optimizer state that was restored from a checkpoint, and begin to measure the time."""
        put_on_device(trainer, model)
        self._sanity_check_began = time.perf_counter()

    def end_sanity_check(self, trainer: Trainer) -> None:
        """Log the time of the sanity check, by which the Memory tab shows it."""
        elapsed_ms = 1000 * (time.perf_counter() - self._sanity_check_began)
        log_scalars(trainer, {"time/sanity_check_ms": elapsed_ms}, training_step(trainer))

    def begin_training(self, trainer: Trainer, model: LightningModule) -> None:
        """Begin the train stage."""
        put_on_device(trainer, model)  # the sanity check may have been skipped
        between: Phase | None = None if model.automatic_optimization else "forward"
        self._running().begin_training(training_step(trainer), trainer.optimizers, between_phases=between)

    def begin_step(self, trainer: Trainer, model: LightningModule, batch: Any) -> None:
        """Begin a training step with its forward phase."""
        if training_step(trainer) == self._snapshot_at_step:
            self._begin_snapshot(trainer, model, batch)
        self.begin_phase("forward")

    def begin_phase(self, phase: Phase) -> None:
        """Begin a phase of the step."""
        self._running().switch_phase(phase)
        if self._step_snapshot is not None:
            self._step_snapshot.mark(phase)

    def leave_backward(self) -> None:
        """End the backward phase."""
        self._running().leave_backward()

    def end_step(self, trainer: Trainer, model: LightningModule, batch: Any) -> None:
        """End a training step, and log a point if one is due."""
        del model
        run = self._running()
        if self._step_snapshot is not None and not is_accumulating(trainer):
            self._end_snapshot(trainer)
        run.switch_phase(None)
        run.write_arrived()
        # Before a validation at the end of the epoch, which drops the gradients: they are part of the peak.
        if is_due(trainer, self._every_n_steps) or trainer.is_last_batch:
            self._log_training(trainer, training_step(trainer), batch)

    def end_epoch(self, trainer: Trainer) -> None:
        """Log a point unless the epoch's last step already has one."""
        last = training_step(trainer) - 1  # the axis is already one ahead here
        if last > self._running().last_step:
            self._log_training(trainer, last)

    def end_training(self) -> None:
        """End the train stage."""
        self._running().leave("train")

    def begin_evaluation(self, trainer: Trainer, model: LightningModule, stage: Stage) -> None:
        """Begin a stage; the sanity check is none."""
        if trainer.sanity_checking:
            return
        put_on_device(trainer, model)
        write_layout(trainer)  # a test after fit adds a chart of its own
        self._running().enter(stage)

    def log_batch(self, trainer: Trainer, stage: Stage) -> None:
        """Log a point of an evaluation batch, where that was asked for."""
        if self._eval_batches and not trainer.sanity_checking:
            index = self._n_batches.get(stage, 0)
            self._n_batches[stage] = index + 1
            log_scalars(trainer, self._running().batch_point(stage), index)

    def end_evaluation(self, trainer: Trainer, stage: Stage) -> None:
        """Log the point of an evaluation, and end its stage."""
        if trainer.sanity_checking:
            return
        run = self._running()
        owned = run.owned_by(trainer.lightning_module, trainer.optimizers, self._device)
        self._look_at_host(trainer, None)
        self._warn(trainer, run.add_point(stage, training_step(trainer), partial(log_scalars, trainer), owned))
        run.leave(stage)

    def end(self, trainer: Trainer, *, waits_for_ranks: bool) -> None:
        """Write the summary and stop watching. Does nothing when called again."""
        if self._run is not None:
            # Where the call has failed, memory may have run out since the last point.
            last = {} if waits_for_ranks else self._run.last_scalars()
            summary = self._run.summary(waits_for_ranks=waits_for_ranks)
            events = [getattr(callback, "memory_remark", "") for callback in callbacks_of(trainer)]
            summary = replace(summary, events=tuple(filter(None, events)))
            if last:
                log_scalars(trainer, last, training_step(trainer))
            if trainer.is_global_zero:
                text, name = summary.markdown(), f"memory_summary_{self._run.call}.md"
                write_report_or_warn(self._directory, name, text)
                self._summary_step = max(self._summary_step + 1, training_step(trainer))
                log_text(trainer, "memtools/memory_summary", text, self._summary_step, file=f"memtools/{name}")
                summary.print()
        self._stop()

    def _begin_snapshot(self, trainer: Trainer, model: LightningModule, batch: Any) -> None:
        if self._step_snapshot is not None:  # a later batch of the same step
            return
        self._step_snapshot = StepSnapshot.begin(reader_for(self._device), model, trainer.optimizers, batch)
        if self._step_snapshot is None:
            self._warn(
                trainer, [f"snapshot_at_step: {self._device} keeps no history of its allocator, so none is taken."]
            )

    def _end_snapshot(self, trainer: Trainer) -> None:
        snapshot, self._step_snapshot = self._step_snapshot, None
        if snapshot is None:
            return
        step, rank = training_step(trainer), trainer.global_rank
        taken = snapshot.end(step=step, rank=rank)
        written = write_file(
            self._directory, f"memory_snapshot_step{step}_rank{rank}.pickle", partial(write_snapshot, taken)
        )
        if isinstance(written, NotWritten):
            self._warn(trainer, [f"The memory snapshot of step {step} {written.reason}."])

    def _log_training(self, trainer: Trainer, step: int, batch: Any = None) -> None:
        run = self._running()
        owned = run.owned_by(trainer.lightning_module, trainer.optimizers, self._device, batch)
        self._look_at_host(trainer, trainer.current_epoch)
        self._warn(trainer, run.add_training_point(step, partial(log_scalars, trainer), owned))

    def _look_at_host(self, trainer: Trainer, epoch: int | None) -> None:
        datasets = (getattr(loader, "dataset", None) for loader in prepared_loaders(trainer.fit_loop))
        host, texts = self._host.look(epoch=epoch, datasets=datasets)
        self._running().see_host(host)
        self._warn(trainer, texts)

    def _warn(self, trainer: Trainer, texts: list[str]) -> None:
        if trainer.is_global_zero:
            for text in texts:
                warnings.warn(text, stacklevel=4)

    def _running(self) -> MemoryRun:
        if self._run is None:
            raise RuntimeError("MemoryMonitor's hooks were called without its setup hook.")
        return self._run

    def _stop(self) -> None:
        if self._step_snapshot is not None:
            self._step_snapshot.stop()
        self._step_snapshot = None
        if self._run is not None:
            self._run.close()
        self._run = None
        self._carried.leave()


@cache
def _say_that_there_is_no_gpu() -> None:
    """Print how to see more: once, since a script may make many Trainers."""
    print_on_console(NO_GPU)
