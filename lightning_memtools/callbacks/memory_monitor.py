"""MemoryMonitor: shows where the memory goes, in every logger."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_memtools._lightning import callbacks_of, is_accumulating, running_stage, training_step
from lightning_memtools.callbacks.guarded import WatchingCallback
from lightning_memtools.memory.allocator import write_snapshot
from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.memory.peaks import Phase, Stage
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.step_snapshot import StepSnapshot
from lightning_memtools.memory.virtual import put_on_device
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import NO_RUN, NotWritten, report_directory, write_file, write_report_or_warn
from lightning_memtools.reporting.loggers import FIRST_STEPS, checked_interval, is_due, log_scalars, log_text
from lightning_memtools.reporting.memory_run import NO_GPU, MemoryRun
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.tables import console_table
from lightning_memtools.warning_categories import DegradedWarning, FindingWarning, MemtoolsWarning

# A script may make many Trainers: what a run without a GPU is told need not be said again.
_IS_FIRST_WITHOUT_PEAKS = FirstTime()


class MemoryMonitor(WatchingCallback):
    """Logs allocated and reserved memory, the peaks, and what each peak consists of, for every stage, to every logger.

    With several ranks, values are maxima over the ranks. A peak is the maximum since the last point that was logged for
    the stage, so none is missed. Each point resets `torch.cuda.max_memory_allocated`, also for other code that reads
    it. A summary ends every fit, validate, test and predict call: on the console, as the file
    `<log_dir>/memtools/memory_summary_<call>.md`, and as text in loggers that take text.

    docs/memory-monitor.md has the tags.

    Nothing waits for the device, as the statistics are counters on the host. No rank waits for another: rank 0 writes
    a point once the values of all ranks are there, and leaves out ranks that have fewer batches or have ended.

    Args:
        every_n_steps: Training steps between two points; None for the Trainer's `log_every_n_steps`. Every epoch also
            ends with a point, and steps 0, 1, 2, 4, 8, 16 and 32 have one.
        phases: Also log the peak and the host's time for forward, backward and optimizer step, and the time between
            batches. Reads the statistics five times in every training step. On a GPU the host's time in forward and
            backward is the time to queue kernels. A wait for the device counts toward the phase that waits.
        snapshot_at_step: Write a memory snapshot of this training step on every rank, as
            `<log_dir>/memtools/memory_snapshot_step<n>_rank<r>.pickle`, with its phases and modules marked. The Memory
            tab, `memtools snapshot` and https://pytorch.org/memory_viz show it. Recording slows that one step down.

    Raises:
        ValueError: `every_n_steps` is below 1, or `snapshot_at_step` below 0.
    """

    page = "memory-monitor"
    documented = (torch.OutOfMemoryError,)  # a model may not fit on the VirtualDevice that it is put on
    takes_part_in_trials = False
    parts_of_a_run = ("_run", "_step_snapshot")

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        phases: bool = False,
        snapshot_at_step: int | None = None,
    ) -> None:
        if snapshot_at_step is not None and not is_count(snapshot_at_step, least=0):
            raise ValueError(
                f"snapshot_at_step={snapshot_at_step!r} is no training step. Give a number from 0 upwards."
            )
        self.every_n_steps = checked_interval(every_n_steps)
        self.phases = phases
        self.snapshot_at_step = snapshot_at_step
        self._run: MemoryRun | None = None
        self._step_snapshot: StepSnapshot | None = None
        self._directory: Path | NotWritten = NO_RUN
        self._device = torch.device("cpu")
        # TensorBoard drops the later points of a tag that comes again at the same or an earlier step. So this count
        # goes on over all calls of the Trainer.
        self._summary_step = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the device, and warn if it has no memory statistics or does not track peaks."""
        self.stop_watching()
        device = self._device = trainer.strategy.root_device
        reader = reader_for(device)
        self._run = MemoryRun(
            device,
            reader,
            partial(log_scalars, trainer),
            call=TrainerFn(stage).value,  # an enum, which prints as "TrainerFn.FITTING"
            phases=self.phases and stage == "fit",
            has_trained=training_step(trainer) > 0,
        )
        self._directory = report_directory(trainer)
        if self._run.shortcoming not in {"", NO_GPU}:
            self._warn(trainer, self._run.shortcoming)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure the train stage. On a simulated VirtualDevice, count the model's memory as allocated."""
        put_on_device(pl_module, trainer.optimizers)
        between: Phase | None = None if pl_module.automatic_optimization else "forward"
        self._running.begin_training(training_step(trainer), trainer.optimizers, between_phases=between)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start measuring the forward phase. At the first batch of the step `snapshot_at_step`, start the snapshot."""
        if training_step(trainer) == self.snapshot_at_step and self._step_snapshot is None:
            self._step_snapshot = StepSnapshot.begin(reader_for(self._device), pl_module, trainer.optimizers, batch)
            if self._step_snapshot is None:
                text = f"snapshot_at_step: {self._device} keeps no history of its allocator, so none is taken."
                self._warn(trainer, text)
        self._begin_phase("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Start measuring the backward phase."""
        self._begin_phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop measuring the backward phase."""
        self._running.leave_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Start measuring the optimizer phase."""
        self._begin_phase("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a point if one is due. At the end of step `snapshot_at_step`, write the memory snapshot."""
        if self._step_snapshot is not None and not is_accumulating(trainer):
            self._write_snapshot(trainer, self._step_snapshot)
        self._running.switch_phase(None)
        self._running.write_arrived()
        # Before a validation at the end of the epoch, which drops the gradients: they are part of the peak.
        step = training_step(trainer)
        if is_due(trainer, self.every_n_steps) or trainer.is_last_batch:
            self._log(trainer, "train", step, batch, warms_up=step in FIRST_STEPS)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a point unless the epoch's last step already has one."""
        last = training_step(trainer) - 1  # the axis is already one ahead here
        if last > self._running.last_step:
            self._log(trainer, "train", last)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop measuring the train stage."""
        self._running.leave("train")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure an evaluation stage. On a simulated VirtualDevice, count the model's memory as allocated."""
        put_on_device(pl_module, trainer.optimizers)
        if not trainer.sanity_checking:
            self._running.enter(running_stage(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a point for the evaluation, and stop measuring its stage."""
        if not trainer.sanity_checking:
            self._log(trainer, running_stage(trainer), training_step(trainer))
            self._running.leave(running_stage(trainer))

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the summary, over all ranks whose values have arrived."""
        self._end(trainer, has_failed=False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the summary without waiting for other ranks, since they may have failed too."""
        self._end(trainer, has_failed=True)

    def stop_watching(self) -> None:
        """Stop measuring. Idempotent."""
        if self._step_snapshot is not None:
            self._step_snapshot.stop()
        if self._run is not None:
            self._run.close()
        self._run = self._step_snapshot = None

    def _end(self, trainer: Trainer, *, has_failed: bool) -> None:
        """Write the summary and stop watching. Idempotent."""
        run = self._run
        if run is not None:
            # Where the call has failed, memory may have run out since the last point.
            log_scalars(trainer, run.last_scalars() if has_failed else {}, training_step(trainer))
            remarks = [each.memory_remark for each in callbacks_of(trainer) if isinstance(each, Neighbour)]
            summary = run.summary(waits_for_ranks=not has_failed, events=remarks)
            if trainer.is_global_zero:
                text, name = summary.markdown(), f"memory_summary_{run.call}.md"
                write_report_or_warn(self._directory, name, text)
                self._summary_step = max(self._summary_step + 1, training_step(trainer))
                log_text(trainer, "memtools/memory_summary", text, self._summary_step)
                if summary.peaks or _IS_FIRST_WITHOUT_PEAKS():
                    print_on_console(summary.title)
                    print_on_console(*map(console_table, summary.tables()), *summary.remarks)
        self.stop_watching()

    def _begin_phase(self, phase: Phase) -> None:
        self._running.switch_phase(phase)
        if self._step_snapshot is not None:
            self._step_snapshot.mark(phase)

    def _write_snapshot(self, trainer: Trainer, snapshot: StepSnapshot) -> None:
        self._step_snapshot = None
        step, rank = training_step(trainer), trainer.global_rank
        name = f"memory_snapshot_step{step}_rank{rank}.pickle"
        written = write_file(self._directory, name, partial(write_snapshot, snapshot.end(step=step, rank=rank)))
        if isinstance(written, NotWritten):
            self._warn(trainer, f"The memory snapshot of step {step} {written.reason}.")

    def _log(self, trainer: Trainer, stage: Stage, step: int, batch: Any = None, *, warms_up: bool = False) -> None:
        texts = self._running.add_point(
            stage,
            step,
            trainer.lightning_module,
            trainer.optimizers,
            batch=batch,
            epoch=trainer.current_epoch if stage == "train" else None,
            warms_up=warms_up,
        )
        self._warn(trainer, *texts, category=FindingWarning)

    def _warn(self, trainer: Trainer, *texts: str, category: type[MemtoolsWarning] = DegradedWarning) -> None:
        for text in texts if trainer.is_global_zero else ():
            warnings.warn(text, category, stacklevel=4)

    @property
    def _running(self) -> MemoryRun:
        assert self._run is not None, "setup comes before every other hook"
        return self._run
