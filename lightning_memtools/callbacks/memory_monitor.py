"""MemoryMonitor: shows where the memory goes, in every logger."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_memtools._lightning import EitherCallback
from lightning_memtools.reporting.loggers import Charts, checked_interval
from lightning_memtools.reporting.monitored_calls import MonitoredCalls


class MemoryMonitor(EitherCallback):
    """Logs allocated and reserved memory, their peaks and their composition, for every stage, to every logger.

    With several ranks a tag is the maximum over ranks. Peaks are the highest since the stage's last point, so a short
    spike is never lost between two points. A summary ends every fit, validate, test and predict call: on the console,
    as the file `<log_dir>/memtools/memory_summary_<call>.md`, and as text in loggers that take text.

    | tag | unit | meaning |
    | --- | --- | --- |
    | `memory/<stage>/allocated_gib`, `memory/<stage>/reserved_gib` | GiB | of tensors, and reserved, at the point |
    | `memory/<stage>/peak_allocated_gib`, `memory/<stage>/peak_reserved_gib` | GiB | highest since the last point |
    | `memory/<stage>/peak_used_pct` | % | peak reserved as a share of the device |
    | `memory/<stage>/fragmentation_pct` | % | share of reserved memory that is free and cannot be released |
    | `memory/capacity_gib`, `memory/device_used_gib` | GiB | of the device; used by all processes |
    | `memory/composition/<category>_gib` | GiB | parameters, gradients, optimizer, activations, inputs, other at peak |
    | `memory/alloc_retries`, `memory/ooms` | count | allocation retries and out-of-memory errors since the call began |
    | `memory/train/peak_<phase>_gib` | GiB | with `phases`: the highest of forward, backward and optimizer |
    | `memory/host_rss_gib` | GiB | resident memory of the process |
    | `memory/host/process_gib`, `memory/host/unique_gib` | GiB | the process: shared pages divided, or left out |
    | `memory/host/workers_gib`, `memory/host/pinned_gib` | GiB | loader workers (PSS); pinned memory that torch holds |
    | `memory/host/used_gib`, `memory/host/limit_gib` | GiB | of the container, or of the machine |
    | `memory/host/shared_gib` | GiB | the used part of /dev/shm |
    | `time/step_ms`, `time/sanity_check_ms` | ms | host time of a step (mean), and of the sanity check |
    | `memory/<stage>/peak_allocated_gib_min` | GiB | several ranks: the smallest peak |
    | `memory/<stage>/peak_rank` | rank | several ranks: the one with the largest peak |
    | `memory/<stage>/batch_<figure>_gib` | GiB | with `eval_batches`: the first four figures, per evaluation batch |

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
        snapshot_at_step: Write a memory snapshot of this training step on every rank, as
            `<log_dir>/memtools/memory_snapshot_step<n>_rank<r>.pickle`, with its phases and modules marked. The Memory
            tab, `memtools snapshot` and https://pytorch.org/memory_viz show it. Recording slows that one step down.

    Raises:
        ValueError: `every_n_steps` is below 1, or `snapshot_at_step` below 0.
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
        snapshot_at_step: int | None = None,
    ) -> None:
        self.every_n_steps = checked_interval(every_n_steps)
        self.phases = phases
        self.per_rank = per_rank
        self.eval_batches = eval_batches
        self.reset_peaks = reset_peaks
        self.snapshot_at_step = snapshot_at_step
        self._calls = MonitoredCalls(
            every_n_steps=self.every_n_steps,
            phases=phases,
            per_rank=per_rank,
            eval_batches=eval_batches,
            reset_peaks=reset_peaks,
            snapshot_at_step=snapshot_at_step,
        )

    def charts(self, trainer: Trainer) -> Charts:
        """Return one chart per stage for allocated and reserved memory, one for the composition, and so on."""
        return self._calls.charts(trainer)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the device, and warn if it keeps no statistics or no peaks."""
        self._calls.begin(trainer, stage)

    def leave_out_of_counts(self, *, alloc_retries: int, ooms: int) -> None:
        """Leave events of a trial out of the counts; BatchSizeTuner calls this."""
        self._calls.leave_out(alloc_retries=alloc_retries, ooms=ooms)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layout of TensorBoard's custom scalars."""
        self._calls.begin_fit(trainer, pl_module)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count optimizer state that was restored from a checkpoint."""
        self._calls.begin_sanity_check(trainer, pl_module)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the time of the sanity check."""
        self._calls.end_sanity_check(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the train stage."""
        self._calls.begin_training(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the forward phase."""
        self._calls.begin_step(trainer, pl_module, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Begin the backward phase."""
        self._calls.begin_phase("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the backward phase."""
        self._calls.leave_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Begin the optimizer phase."""
        self._calls.begin_phase("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a point if one is due."""
        self._calls.end_step(trainer, pl_module, batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a point unless the epoch's last step already has one."""
        self._calls.end_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the train stage."""
        self._calls.end_training()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the val stage."""
        self._calls.begin_evaluation(trainer, pl_module, "val")

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log a point of the batch, with `eval_batches=True`."""
        self._calls.log_batch(trainer, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the run's point."""
        self._calls.end_evaluation(trainer, "val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the test stage."""
        self._calls.begin_evaluation(trainer, pl_module, "test")

    def on_test_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log a point of the batch, with `eval_batches=True`."""
        self._calls.log_batch(trainer, "test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the run's point."""
        self._calls.end_evaluation(trainer, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the predict stage."""
        self._calls.begin_evaluation(trainer, pl_module, "predict")

    def on_predict_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log a point of the batch, with `eval_batches=True`."""
        self._calls.log_batch(trainer, "predict")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the run's point."""
        self._calls.end_evaluation(trainer, "predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the summary, over all ranks whose figures have arrived."""
        self._calls.end(trainer, waits_for_ranks=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the summary without waiting for other ranks: they may have failed too."""
        self._calls.end(trainer, waits_for_ranks=False)
