"""Searches for batch sizes before a fit, has the fit use them, and reports them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from tempfile import TemporaryDirectory

from lightning.pytorch import Callback, Trainer

from lightning_memtools._lightning import callbacks_of, forget_loaders, loop_of, source_of, training_step
from lightning_memtools._torch import AnyBatchNorm
from lightning_memtools.batch_size.batch_size_result import BatchSizeResult, SizeTrial, explain_that_nothing_fits
from lightning_memtools.batch_size.size_limits import STAGES, SizeLimits, TunerSettings
from lightning_memtools.batch_size.size_search import find_largest, largest_that_fits, next_size
from lightning_memtools.batch_size.trainer.stage_sizes import StageSizes, has_data
from lightning_memtools.batch_size.trainer.trial_probe import ANOTHER_ERROR
from lightning_memtools.batch_size.trainer.trial_runner import TrialRunner, takes_part
from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.peaks import Stage
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.virtual import put_on_device
from lightning_memtools.reporting.console import print_on_console, progress_printed
from lightning_memtools.reporting.files import report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.state.state_snapshot import StateSnapshot

# The samples of validation batches while training is tuned, and the first size where none is configured.
_FEW = 2


class SizeTuning:
    """Searches for the batch sizes of training and validation, makes the fit use them, and saves them in checkpoints.

    Args:
        settings: The arguments of BatchSizeTuner.

    Attributes:
        found: The batch size found for each stage ("train", "val"), in this run or in the run that this one resumes.
        accumulate: The number of micro-batches per optimizer step; None to keep the Trainer's own setting.
    """

    def __init__(self, settings: TunerSettings) -> None:
        self.settings = settings
        self.found: dict[Stage, int] = {}
        self.accumulate: int | None = None
        self._sizes: StageSizes | None = None

    def begin_fit(self, trainer: Trainer, later: Sequence[Callback]) -> BatchSizeResult | None:
        """Search for batch sizes and return the result. If a checkpoint held sizes, only apply these and return None.

        Args:
            trainer: The Trainer, in `on_fit_start`.
            later: The callbacks whose `on_fit_start` Lightning has not called yet. Each trial begins by calling them.
        """
        if not _can_start(trainer):
            return None
        module = trainer.lightning_module
        stages = [stage for stage in STAGES if stage in self.settings.stages]
        self._sizes = sizes = StageSizes(trainer, self.settings.batch_arg_name)
        if stages[0] in self.found:
            stages = [stage for stage in stages if stage in self.found]
            self._apply(trainer, sizes, stages)
            known = ", ".join(f"{stage} {self.found[stage]}" for stage in stages)
            _say(trainer, f"using the sizes found before: {known}.")
            result = None
        else:
            hooks = [partial(callback.on_fit_start, trainer, module) for callback in later if takes_part(callback)]
            result = self._search(trainer, sizes, stages, [*hooks, module.on_fit_start])
        put_on_device(module, trainer.optimizers)
        return result

    def undo(self) -> None:
        """Undo the changes to the Trainer's loaders. Attributes such as `batch_size` keep the new value. Idempotent."""
        if self._sizes is not None:
            self._sizes.undo()
        self._sizes = None

    def _search(
        self, trainer: Trainer, sizes: StageSizes, stages: Sequence[Stage], hooks: Sequence[Callable[[], None]]
    ) -> BatchSizeResult:
        """Search for a batch size for each stage that has data, apply and report the sizes, and return the result.

        Raises:
            RuntimeError: Not even the smallest size fits.
            ValueError: There is no attribute for the batch size, or the loaders ignore it.
        """
        directory = report_directory(trainer)  # collective, so before the ranks differ
        began_at, reader = time.perf_counter(), reader_for(trainer.strategy.root_device)
        stages = [stage for stage in stages if has_data(trainer, stage)]
        sizes.check_name(stages)
        gc.collect()
        chosen: dict[Stage, SizeTrial] = {}
        trials: list[SizeTrial] = []
        notes: list[str] = []
        with TemporaryDirectory(prefix="memtools-") as root, gc_frozen():
            runner = TrialRunner(trainer, self.settings, sizes, hooks=hooks, root=root)
            shows = progress_printed(lambda: "BatchSizeTuner runs trials")
            with shows if trainer.is_global_zero else nullcontext():
                for stage in stages:
                    if stage == "train" and "val" in stages:
                        # While training is tuned, validation runs with as little as it can.
                        least = self._limits(trainer, "val").round_down(self.settings.init_val or _FEW)
                        runner.sizes["val"] = least or self.settings.multiple_of
                    limits = self._limits(trainer, stage)
                    tried = self._search_stage(runner, stage, limits, sizes.configured.get(stage))
                    trials += tried
                    largest = largest_that_fits(tried)
                    if largest is None:
                        raise RuntimeError(explain_that_nothing_fits(stage, tried))
                    runner.sizes[stage] = largest.size
                    chosen[stage] = largest
                    notes += self._notes_on_search(largest, tried, limits)
                    vary = [s for (other, _), s in runner.sample_sizes.items() if other == stage and s is not None]
                    notes += [f"The {stage} {s.described()}; trials used the largest." for s in vary]
        self.found |= {stage: trial.size for stage, trial in chosen.items()}
        if self.settings.effective_batch_size is not None and "train" in chosen:
            self.accumulate = runner.accumulate_for(self.found["train"])
        self._apply(trainer, sizes, stages)
        if "train" in chosen:
            notes += self._notes_on_steps(trainer, sizes.configured.get("train"))
        result = BatchSizeResult(
            sizes={str(stage): trial.size for stage, trial in chosen.items()},
            trials=tuple(trials),
            peaks={str(stage): trial.peak for stage, trial in chosen.items()},
            accumulate=trainer.accumulate_grad_batches,
            seconds=time.perf_counter() - began_at,
            device="" if reader is None else f"On {reader.name}.",
            n_ranks=trainer.world_size,
            notes=tuple(notes),
        )
        if trainer.is_global_zero:
            write_report_or_warn(directory, "batch_size.md", result.markdown())
            log_text(trainer, "memtools/batch_size", result.markdown(), training_step(trainer))
            print_on_console("\n  ".join([f"BatchSizeTuner: {result.summary()}", *result.notes]))
        return result

    def _search_stage(
        self, runner: TrialRunner, stage: Stage, limits: SizeLimits, configured: int | None
    ) -> list[SizeTrial]:
        def run(size: int) -> SizeTrial:
            trial = runner.run(stage, size, limits)
            is_unlimited = trial.limit is None and trial.peak is not None
            if is_unlimited and limits.max_val is None and limits.n_samples is None:
                raise ValueError(
                    "Nothing limits the batch size: the device has no capacity, the data set has no length, and "
                    "max_val is None. Set max_val."
                )
            return trial

        start = [size for size in (self.settings.init_val, configured) if size] or [_FEW]
        return find_largest(run, start=start, limits=limits, max_trials=self.settings.max_trials)

    def _limits(self, trainer: Trainer, stage: Stage) -> SizeLimits:
        min_batches, is_train = 1.0, stage == "train"
        share, interval = getattr(trainer, f"limit_{stage}_batches"), trainer.val_check_interval
        if isinstance(share, float) and 0 < share < 1:
            min_batches = 1 / share
        if is_train and type(interval) is int and trainer.check_val_every_n_epoch is not None:
            min_batches = max(min_batches, interval)
        norms = [module for module in trainer.lightning_module.modules() if isinstance(module, AnyBatchNorm)]
        return SizeLimits(
            max_val=self.settings.max_val,
            multiple_of=self.settings.multiple_of,
            per_rank=self.settings.per_rank(trainer.world_size) if is_train else None,
            min_batches=min_batches,
            avoid_single=is_train and any(norm.training for norm in norms),
        )

    def _apply(self, trainer: Trainer, sizes: StageSizes, stages: Sequence[Stage]) -> None:
        """Set the batch sizes that were found, in attributes and loaders. Recreate the optimizers and schedulers."""
        if stages:  # after the fit, the attribute that both stages share holds training's size
            sizes.write(self.found[stages[0]], for_loggers=True)
        for stage, size in {**sizes.of_hooks, **{stage: self.found[stage] for stage in stages}}.items():
            sizes.set(stage, size)
        if self.accumulate is not None:
            trainer.accumulate_grad_batches = self.accumulate
        for stage in STAGES:
            forget_loaders(loop_of(trainer, stage))
        # A scheduler may depend on the number of steps. To know it, it may have had the loaders made, which draws
        # random numbers: they are drawn once.
        sources = [source_of(loop_of(trainer, stage)) for stage in STAGES]
        streams = StateSnapshot([source.instance for source in sources if not source.is_module()])
        trainer.strategy.setup_optimizers(trainer)
        trainer.strategy.setup_precision_plugin()
        streams.restore()

    def _notes_on_search(self, chosen: SizeTrial, trials: Sequence[SizeTrial], limits: SizeLimits) -> list[str]:
        """Return sentences for the report if something other than memory or `max_val` limited the chosen batch size."""
        size, stage, notes = chosen.size, chosen.stage, list[str]()
        if stage == "train" and size == limits.n_samples:
            notes.append(
                f"LIMITED BY THE SIZE OF THE DATASET: one batch of {size} is a whole epoch, so weights are updated "
                "once in it. Set max_val, or effective_batch_size, to the largest batch that you want to train with."
            )
        failed = next((trial for trial in trials if trial.outcome.startswith(ANOTHER_ERROR)), None)
        if failed is not None:
            notes.append(f"A batch of {failed.size} in {stage} ended with {failed.outcome}. The size stays below.")
        if len(trials) >= self.settings.max_trials and next_size(trials, limits, left=1) is not None:
            notes.append(f"The search for {stage} ended with max_trials; a larger size may fit.")
        return notes

    def _notes_on_steps(self, trainer: Trainer, old: int | None) -> list[str]:
        """Return a sentence on the learning rate if the samples per step changed. `old` is the old batch size."""
        new, per_size = self.found["train"], trainer.accumulate_grad_batches * trainer.world_size
        if any(is_learning_rate_finder(callback) for callback in callbacks_of(trainer)):
            return [f"The learning rate that LearningRateFinder finds belongs to steps of {new * per_size} samples."]
        if old in {None, new} or self.accumulate is not None:
            return []
        before = (old or 0) * per_size
        changed = f"A step went from {before} to {new * per_size} samples."
        advice = f"effective_batch_size={before} keeps the old number by gradient accumulation."
        return [f"{changed} The learning rate is the one of configure_optimizers; {advice}"]


def is_learning_rate_finder(callback: Callback) -> bool:
    """Return True if a callback is Lightning's LearningRateFinder."""
    return any(kind.__name__ == "LearningRateFinder" for kind in type(callback).__mro__)


def _can_start(trainer: Trainer) -> bool:
    """Return True if trials can run. With `fast_dev_run` or on a CPU, print why not and return False.

    Raises:
        RuntimeError: The strategy does not allow trials.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        _say(trainer, "skipped, because fast_dev_run=True keeps the batch size as it is.")
        return False
    reason = why_unsupported("BatchSizeTuner", type(trainer.strategy))
    if reason is not None:
        raise RuntimeError(f"BatchSizeTuner cannot run trials here: {reason}, and remove BatchSizeTuner.")
    device = trainer.strategy.root_device
    if device.type == "cpu" and reader_for(device) is None:
        _say(trainer, "a CPU keeps no memory statistics, so the batch size stays as it is. Inside "
             "`with VirtualDevice('24GiB'):` it is found for that device.")  # fmt: skip
        return False
    return True


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        print_on_console(f"BatchSizeTuner: {text}")
