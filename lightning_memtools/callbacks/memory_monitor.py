"""MemoryMonitor: shows where the memory goes, in every logger."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_memtools._lightning import training_step
from lightning_memtools.memory.peaks import Phase, Stage
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.reporting.carried_device import CarriedDevice, put_on_device
from lightning_memtools.reporting.files import NO_RUN, NotWritten, report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import Charts, checked_interval, is_due, log_scalars, log_text, write_layout
from lightning_memtools.reporting.memory_run import MemoryRun


class MemoryMonitor(Callback):
    """Logs allocated and reserved memory, their peaks and their composition, for every stage, to every logger.

    Sizes are in GiB (2^30 bytes); `<stage>` is train, val, test or predict.

    | tag | value |
    | --- | --- |
    | `memory/<stage>/allocated_gib`, `memory/<stage>/reserved_gib` | at the moment of logging |
    | `memory/<stage>/peak_allocated_gib`, `memory/<stage>/peak_reserved_gib` | highest since the stage's last point |
    | `memory/<stage>/peak_used_pct` | peak reserved memory as a share of the device |
    | `memory/<stage>/fragmentation_pct` | share of reserved memory that is free but cannot be released |
    | `memory/<stage>/peak_allocated_gib_min`, `memory/<stage>/peak_rank` | lowest rank, and the rank of the highest |
    | `memory/<stage>/batch_*` | the same for each evaluation batch, with `eval_batches=True` |
    | `memory/train/peak_{forward,backward,optimizer}_gib` | peaks of the phases, with `phases=True` |
    | `memory/composition/<category>_gib` | what the last peak consisted of, where that is known |
    | `memory/capacity_gib`, `memory/device_used_gib` | the device's memory, and what all processes use of it |
    | `memory/alloc_retries`, `memory/ooms` | counts since the call began |
    | `memory/host_rss_gib` | resident host memory of this process |
    | `time/step_ms` | host time per training step, mean since the last point |
    | text `memtools/memory_summary` | the summary of each call |

    With several ranks a tag is the maximum over ranks. Peaks are the highest since the stage's last point, so a short
    spike is never lost between two points. A summary table ends every fit, validate, test and predict call: on the
    console, as the file `<log_dir>/memtools/memory_summary_<call>.md`, and as text in loggers that take text.

    Nothing waits for the device, since statistics are host counters, and no rank waits for another one: rank 0 writes a
    point once the figures of all ranks have arrived, and leaves out ranks that have fewer batches or have ended.

    Args:
        every_n_steps: Training steps between two points; None is the Trainer's `log_every_n_steps`. Every epoch also
            ends with a point.
        phases: Also log the peaks of forward, backward and optimizer step. Reads the statistics five times in every
            training step.
        per_rank: With several ranks, also log every rank's own values, as `<tag>/rank<r>`.
        eval_batches: Besides the point of each evaluation run, log a point per evaluation batch over the count of that
            stage's batches (rank 0's own values).
        reset_peaks: Reset the device's peak counters at every point. Other readers of
            `torch.cuda.max_memory_allocated` then see the peak since the last point. With False the counters are not
            reset, and the logged peaks are the device's running maximum over all stages.

    Raises:
        ValueError: `every_n_steps` is below 1.
    """

    takes_part_in_trials = False
    """BatchSizeTuner's trials leave this callback out."""

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        phases: bool = False,
        per_rank: bool = False,
        eval_batches: bool = False,
        reset_peaks: bool = True,
    ) -> None:
        self.every_n_steps = checked_interval(every_n_steps)
        self.phases = phases
        self.per_rank = per_rank
        self.eval_batches = eval_batches
        self.reset_peaks = reset_peaks
        self._run: MemoryRun | None = None
        self._directory: Path | NotWritten = NO_RUN
        self._carried = CarriedDevice()
        # TensorBoard drops the later points of a tag that comes again at the same or an earlier step. So these counts
        # go on over all calls of the Trainer.
        self._n_batches: dict[Stage, int] = {}
        self._summary_step = -1

    def charts(self, trainer: Trainer) -> Charts:
        """Return one chart per stage for allocated and reserved memory, one for the composition, and so on."""
        return self._running().charts(validates=trainer.enable_validation)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the device, and warn if it keeps no statistics or no peaks."""
        self._stop()
        self._carried.enter()
        device = trainer.strategy.root_device
        reader = reader_for(device)
        self._run = MemoryRun(
            reader,
            call=TrainerFn(stage).value,  # an enum, which prints as "TrainerFn.FITTING"
            device=reader.name if reader else str(device),
            reset_peaks=self.reset_peaks,
            phases=self.phases and stage == "fit",
            per_rank=self.per_rank,
            eval_batches=self.eval_batches,
            has_trained=training_step(trainer) > 0,
        )
        self._directory = report_directory(trainer)
        if trainer.is_global_zero and self._run.shortcoming and device.type != "cpu":
            warnings.warn(self._run.shortcoming, stacklevel=2)

    def leave_out_of_counts(self, *, alloc_retries: int, ooms: int) -> None:
        """Leave events of a trial out of the counts; BatchSizeTuner calls this."""
        if self._run is not None:
            self._run.leave_out(alloc_retries=alloc_retries, ooms=ooms)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layout of TensorBoard's custom scalars."""
        put_on_device(trainer, pl_module)
        write_layout(trainer)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count optimizer state that was restored from a checkpoint."""
        put_on_device(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the train stage."""
        put_on_device(trainer, pl_module)  # the sanity check may have been skipped
        between: Phase | None = None if pl_module.automatic_optimization else "forward"
        self._running().begin_training(training_step(trainer), trainer.optimizers, between_phases=between)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the forward phase."""
        self._running().switch_phase("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Begin the backward phase."""
        self._running().switch_phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the backward phase."""
        self._running().leave_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Begin the optimizer phase."""
        self._running().switch_phase("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a point if one is due."""
        self._running().switch_phase(None)
        self._running().write_arrived()
        if is_due(trainer, self.every_n_steps):
            self._log_training(trainer, training_step(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a point unless the epoch's last step already has one."""
        last = training_step(trainer) - 1  # the axis is already one ahead here
        if last > self._running().last_step:
            self._log_training(trainer, last)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the train stage."""
        self._running().leave("train")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the val stage."""
        if not trainer.sanity_checking:
            self._begin_evaluation(trainer, pl_module, "val")

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log a point of the batch, with `eval_batches=True`."""
        if not trainer.sanity_checking:
            self._log_batch(trainer, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the run's point."""
        if not trainer.sanity_checking:
            self._end_evaluation(trainer, "val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the test stage."""
        self._begin_evaluation(trainer, pl_module, "test")

    def on_test_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log a point of the batch, with `eval_batches=True`."""
        self._log_batch(trainer, "test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the run's point."""
        self._end_evaluation(trainer, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the predict stage."""
        self._begin_evaluation(trainer, pl_module, "predict")

    def on_predict_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log a point of the batch, with `eval_batches=True`."""
        self._log_batch(trainer, "predict")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the run's point."""
        self._end_evaluation(trainer, "predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the summary, over all ranks whose figures have arrived."""
        if self._run is not None:
            self._summarize(trainer, self._run, waits_for_ranks=True)
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the summary without waiting for other ranks: they may have failed too."""
        if self._run is not None:
            self._summarize(trainer, self._run, waits_for_ranks=False)
        self._stop()

    def _begin_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: Stage) -> None:
        put_on_device(trainer, pl_module)
        write_layout(trainer)  # a test after fit adds a chart of its own
        self._running().enter(stage)

    def _log_batch(self, trainer: Trainer, stage: Stage) -> None:
        if self.eval_batches:
            index = self._n_batches.get(stage, 0)
            self._n_batches[stage] = index + 1
            log_scalars(trainer, self._running().batch_point(stage), index)

    def _end_evaluation(self, trainer: Trainer, stage: Stage) -> None:
        run = self._running()
        run.add_point(stage, training_step(trainer), partial(log_scalars, trainer))
        run.leave(stage)

    def _log_training(self, trainer: Trainer, step: int) -> None:
        self._running().add_training_point(step, partial(log_scalars, trainer))

    def _running(self) -> MemoryRun:
        if self._run is None:
            raise RuntimeError("MemoryMonitor's hooks were called without its setup hook.")
        return self._run

    def _summarize(self, trainer: Trainer, run: MemoryRun, *, waits_for_ranks: bool) -> None:
        summary = run.summary(waits_for_ranks=waits_for_ranks)
        if not trainer.is_global_zero:
            return
        text = summary.markdown()
        name = f"memory_summary_{run.call}.md"
        write_report_or_warn(self._directory, name, text)
        self._summary_step = max(self._summary_step + 1, training_step(trainer))
        log_text(trainer, "memtools/memory_summary", text, self._summary_step, file=f"memtools/{name}")
        summary.print()

    def _stop(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = None
        self._carried.leave()
