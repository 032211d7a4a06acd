"""MemoryMonitor: where the memory goes, in every logger."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from torch.optim import Optimizer

from lightning_memtools._lightning import training_step
from lightning_memtools.callbacks._virtual import CarriedDevice, put_on_device
from lightning_memtools.memory.peaks import Phase, Stage
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.reporting.charts import Charts, write_layout
from lightning_memtools.reporting.files import NO_RUN, NotWritten, report_directory, write_report_or_warn
from lightning_memtools.reporting.intervals import checked_interval, is_due
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.memory_run import MemoryRun


class MemoryMonitor(Callback):
    """Logs allocated and reserved memory, their peaks and what they consist of, for every stage, to every logger.

    Peaks are the highest since the stage's last point, so a short spike is never lost between two points. A summary
    table ends every fit, validate, test and predict call: on the console, as a file under `<log_dir>/memtools/`, and as
    text in loggers that take text.

    Nothing here waits for the device: statistics are host counters. With several ranks, each logging point waits for
    the other ranks' host code once.

    Args:
        every_n_steps: Training steps between two points; None is the Trainer's `log_every_n_steps`. Every epoch ends
            with a point in any case.
        phases: Also log the peaks of forward, backward and optimizer step. Costs five readings of the statistics in
            every training step.
        per_rank: With several ranks, also log every rank's own values, as `<tag>/rank<r>`.
        eval_batches: Besides the one point per evaluation run, log a point per evaluation batch, as
            `memory/<stage>/batch_*` over the count of that stage's batches (rank 0's own values).
        reset_peaks: Reset the device's peak counters at every point. Other readers of
            `torch.cuda.max_memory_allocated` then see the peak since the last point. With False the counters are left
            alone, and what is logged as a peak is the device's running maximum, of all stages.

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
        # TensorBoard drops what stands at a step when the same tag comes again at that step or an earlier one. So these
        # go on over all calls of the Trainer.
        self._n_batches: dict[Stage, int] = {}
        self._summary_step = -1

    def charts(self, trainer: Trainer) -> Charts:
        """Allocated and reserved share one chart per stage; so do the parts of the composition."""
        if self._run is None or not self._run.knows_the_device:
            return {"memory": {"host": ["memory/host_rss_gib"]}}
        stages = ("train", "val") if trainer.enable_validation else ("train",)
        charts = {f"{stage}: allocated and reserved": [f"memory/{stage}/(peak_)?(allocated|reserved)_gib"]
                  for stage in stages}  # fmt: skip
        charts["device: capacity and use"] = ["memory/(capacity|device_used)_gib"]
        if self._run.knows_the_composition:
            charts["composition at the peak"] = ["memory/composition/[a-z]+_gib"]
        if self.phases:
            charts["train: peak by phase"] = ["memory/train/peak_(forward|backward|optimizer)_gib"]
        if self.per_rank:
            charts["train: peak by rank"] = [r"memory/train/peak_allocated_gib/rank\d+"]
        return {"memory": charts}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the device; say so if it cannot tell."""
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
        """Do not count what happened in trials; BatchSizeTuner calls this."""
        if self._run is not None:
            self._run.leave_out(alloc_retries=alloc_retries, ooms=ooms)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lay out TensorBoard's custom scalars."""
        put_on_device(trainer, pl_module)
        write_layout(trainer)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Account for optimizer state that was restored from a checkpoint."""
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
        """Log a point of the batch if asked to."""
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
        """Log a point of the batch if asked to."""
        self._log_batch(trainer, "test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the run's point."""
        self._end_evaluation(trainer, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the predict stage."""
        self._begin_evaluation(trainer, pl_module, "predict")

    def on_predict_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log a point of the batch if asked to."""
        self._log_batch(trainer, "predict")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the run's point."""
        self._end_evaluation(trainer, "predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End with the summary, over all ranks."""
        if self._run is not None:
            self._summarize(trainer, self._run, over_all_ranks=True)
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End with the summary of this rank: the others may not be there any more."""
        if self._run is not None:
            self._summarize(trainer, self._run, over_all_ranks=False)
        self._stop()

    def _begin_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: Stage) -> None:
        put_on_device(trainer, pl_module)
        self._running().enter(stage)

    def _log_batch(self, trainer: Trainer, stage: Stage) -> None:
        if self.eval_batches:
            index = self._n_batches.get(stage, 0)
            self._n_batches[stage] = index + 1
            log_scalars(trainer, self._running().batch_point(stage), index)

    def _end_evaluation(self, trainer: Trainer, stage: Stage) -> None:
        run = self._running()
        log_scalars(trainer, run.point(stage), training_step(trainer))
        run.leave(stage)

    def _log_training(self, trainer: Trainer, step: int) -> None:
        log_scalars(trainer, self._running().training_point(step), step)

    def _running(self) -> MemoryRun:
        if self._run is None:
            raise RuntimeError("MemoryMonitor's hooks were called without its setup hook.")
        return self._run

    def _summarize(self, trainer: Trainer, run: MemoryRun, *, over_all_ranks: bool) -> None:
        summary = run.summary(over_all_ranks=over_all_ranks)
        if not trainer.is_global_zero:
            return
        text = summary.markdown()
        write_report_or_warn(self._directory, f"memory_summary_{run.call}.md", text)
        self._summary_step = max(self._summary_step + 1, training_step(trainer))
        log_text(trainer, "memtools/memory_summary", text, self._summary_step)
        summary.print(Console())

    def _stop(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = None
        self._carried.leave()
