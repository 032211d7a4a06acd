"""Searches for batch sizes, puts them into effect, and collects the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import forget_loaders, loop_of, source_of, training_step
from lightning_memtools.batch_size.batch_size_result import BatchSizeResult
from lightning_memtools.batch_size.size_limits import TunerSettings
from lightning_memtools.batch_size.trainer.applied_sizes import (
    CacheReleaser,
    OptimizerSetup,
    renew_fit_loaders,
    renew_schedulers,
)
from lightning_memtools.batch_size.trainer.sized_sources import (
    BatchSizeAttributes,
    has_data,
    size_of_passed,
    unwrap_sources,
    wrap_sources,
)
from lightning_memtools.batch_size.trainer.stage_search import StageSearch
from lightning_memtools.batch_size.trainer.trial_isolation import left_out_of_counts, takes_part, why_no_trials
from lightning_memtools.memory.peaks import STAGES, Stage
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.virtual import VirtualDevice, put_on_device
from lightning_memtools.null_cuda.launch import computes_nothing
from lightning_memtools.reporting.console import print_on_console, progress_printed
from lightning_memtools.reporting.files import report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.state.random_state import random_streams_restored


class SizeTuning:
    """The batch sizes of a Trainer's stages: searches for them, puts them into effect, and knows them for checkpoints.

    Args:
        settings: The arguments of BatchSizeTuner.

    Attributes:
        found: The sizes that were found, in this run or in the one that is resumed.
        accumulate: Micro-batches per optimizer step that go with them; None to leave the Trainer's.
        optimizer_setup: Repeats the setup of optimizers for the size that was found.
        cache_releaser: Releases the cache between training and validation; None before sizes are known.
    """

    def __init__(self, settings: TunerSettings) -> None:
        self.settings = settings
        self.found: dict[Stage, int] = {}
        self.accumulate: int | None = None
        self._kept: int | None = None
        self.optimizer_setup = OptimizerSetup()
        self.cache_releaser: CacheReleaser | None = None
        # Read by the loops' sources, which outlive a search.
        self._sizes: dict[Stage, int | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"optimizer_setup": OptimizerSetup()}  # it has seen this process

    def begin_fit(self, trainer: Trainer, later: Sequence[Callback]) -> BatchSizeResult | None:
        """Search before a fit trains, or use the sizes that are known; return the result of a search.

        Args:
            trainer: In its hook that comes before a fit.
            later: The callbacks whose hooks before a fit are still to come; they are called before each trial.
        """
        stages = self.settings.stages_in_fit
        if not stages or not _can_start(trainer, self.settings):
            return None
        module = trainer.lightning_module
        result = None
        if stages[0] in self.found:
            in_fit = [stage for stage in STAGES if stage in self.found and stage in {"train", "val"}]
            attributes = BatchSizeAttributes(trainer, self.settings.names)
            self._sizes = {**self._sizes_before(trainer, attributes), **self.found}
            wrap_sources(trainer, ["train", "val"], attributes, self._sizes.get)
            self._apply(trainer, attributes, in_fit, begins=True)
            reader = reader_for(trainer.strategy.root_device)
            self.cache_releaser = CacheReleaser(reader, self.settings.limit(reader), {})
            sizes = ", ".join(f"{stage} {self.found[stage]}" for stage in in_fit)
            _say(trainer, f"using the sizes found before: {sizes}.")
        else:
            hooks: list[Callable[[], None]] = [
                *(lambda c=one: c.on_fit_start(trainer, module) for one in later if takes_part(one)),
                module.on_fit_start,
            ]
            result = self._search(trainer, stages, hooks, begins=True)
        put_on_device(module, trainer.optimizers)
        return result

    def search_again(self, trainer: Trainer) -> BatchSizeResult | None:
        """Search in the middle of training; return the result, or None where no trial can be run."""
        return self._search(trainer, self.settings.stages_in_fit) if _can_start(trainer, self.settings) else None

    def begin_evaluation(self, trainer: Trainer, stage: Stage) -> BatchSizeResult | None:
        """Search before a call of validate, test or predict, or use a known size; return the result of a search."""
        put_on_device(trainer.lightning_module, trainer.optimizers)
        if stage not in self.settings.stages or not _can_start(trainer, self.settings):
            return None
        result = None
        if stage in self.found:
            self._sizes[stage] = self.found[stage]
            wrap_sources(trainer, [stage], BatchSizeAttributes(trainer, self.settings.names), self._sizes.get)
        else:
            result = self._search(trainer, [stage])
        loop = loop_of(trainer, stage)
        with random_streams_restored():
            forget_loaders(loop)
            loop.setup_data()
            loop.reset()
        return result

    def give_up(self, trainer: Trainer) -> None:
        """Have the fit or evaluation go on as if there had been no search."""
        unwrap_sources(trainer)
        put_on_device(trainer.lightning_module, trainer.optimizers)
        if trainer.state.fn == TrainerFn.FITTING:
            renew_fit_loaders(trainer, at_once=False)

    def undo(self, trainer: Trainer) -> None:
        """Have the loops request their loaders as before. The sizes stay as they were found. Idempotent."""
        unwrap_sources(trainer)
        self.optimizer_setup.forget(trainer)
        self.cache_releaser = None

    def _search(
        self,
        trainer: Trainer,
        stages: Sequence[Stage],
        hooks: Sequence[Callable[[], None]] = (),
        *,
        begins: bool = False,
    ) -> BatchSizeResult:
        """Search for the sizes of the stages that have data, put them into effect, and report them."""
        directory = report_directory(trainer)  # collective, so before the ranks differ
        began_at = time.perf_counter()
        reader = reader_for(trainer.strategy.root_device)
        attributes = BatchSizeAttributes(trainer, self.settings.names)
        tuned: list[Stage] = [stage for stage in STAGES if stage in stages and has_data(trainer, stage)]
        before = self._sizes_before(trainer, attributes)
        rates = _learning_rates(trainer)
        self._sizes = dict(before)
        configured = {
            stage: before[stage] or size_of_passed(trainer, stage) for stage in tuned if stage not in self.found
        }
        settings = self._settings_with_effective(trainer, configured)
        search = StageSearch(trainer, settings, attributes, self._sizes, configured=configured, not_restored=SizeTuning)
        shows = (
            progress_printed(lambda: f"BatchSizeTuner is {search.doing}") if trainer.is_global_zero else nullcontext()
        )
        with shows, left_out_of_counts(trainer, reader):
            search.run(tuned, hooks, begins=begins)
        self.found |= {stage: trial.size for stage, trial in search.found.items()}
        self.accumulate = search.accumulate or self.accumulate
        self._apply(trainer, attributes, tuned, begins=begins)
        peaks = {stage: trial.readings[trainer.global_rank].peak for stage, trial in search.found.items()}
        self.cache_releaser = CacheReleaser(reader, self.settings.limit(reader), peaks)
        notes = search.notes + self._note_on_learning_rate(trainer, before.get("train"), rates)
        if not begins and "train" in search.found and renew_schedulers(trainer):
            notes.append("The learning-rate schedule was built again for the new number of steps.")
        result = BatchSizeResult(
            sizes={str(stage): trial.size for stage, trial in search.found.items()},
            trials=tuple(search.trials),
            peaks={stage: trial.tightest.peak for stage, trial in search.found.items()},
            accumulate=trainer.accumulate_grad_batches,
            seconds=time.perf_counter() - began_at,
            device="" if reader is None else f"On {reader.name}.",
            n_ranks=trainer.world_size,
            notes=tuple(notes),
        )
        if trainer.is_global_zero:
            write_report_or_warn(directory, "batch_size.md", result.markdown())
            log_text(trainer, "memtools/batch_size", result.markdown(), training_step(trainer))
            print_on_console("\n".join([f"BatchSizeTuner: {result.summary()}", *(f"  {one}" for one in result.notes)]))
        return result

    def _settings_with_effective(self, trainer: Trainer, configured: Mapping[Stage, int | None]) -> TunerSettings:
        """Return the settings; with keep="effective" the configured samples per step are in them.

        Raises:
            ValueError: The configured batch size is not known.
        """
        if self.settings.keep != "effective" or trainer.state.fn != TrainerFn.FITTING:
            return self.settings
        size = configured.get("train")
        if size is not None:
            self._kept = size * trainer.accumulate_grad_batches * trainer.world_size
        if self._kept is None:
            raise ValueError('keep="effective": the configured batch size is not known. Give effective_batch_size.')
        return replace(self.settings, keep="learning_rate", effective_batch_size=self._kept)

    def _apply(
        self, trainer: Trainer, attributes: BatchSizeAttributes, stages: Sequence[Stage], *, begins: bool
    ) -> None:
        """Write the sizes; in a fit, have its loaders (and before it begins, its optimizers) made for them."""
        for stage in stages:
            # Attributes that several stages share get training's size.
            has_own = any(name.startswith(f"{stage}_") for name in attributes.names_for(stage))
            if has_own or stage == "train" or len(stages) == 1:
                attributes.write(stage, self.found[stage], for_loggers=True)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.accumulate is not None:
            trainer.accumulate_grad_batches = self.accumulate
        renew_fit_loaders(trainer, at_once=not begins)
        if begins:
            self.optimizer_setup.repeat(trainer)

    def _sizes_before(self, trainer: Trainer, attributes: BatchSizeAttributes) -> dict[Stage, int | None]:
        """Return the current sizes: those of attributes, and for passed loaders those of an earlier search."""
        is_hook = {stage: source_of(loop_of(trainer, stage)).is_module() for stage in STAGES}
        return {stage: attributes.read(stage) if is_hook[stage] else self.found.get(stage) for stage in STAGES}

    def _note_on_learning_rate(self, trainer: Trainer, old: int | None, rates_before: Sequence[float]) -> list[str]:
        new = self.found.get("train")
        if old is None or new is None or old == new or self.accumulate is not None:
            return []
        if _learning_rates(trainer) != rates_before:
            return []
        per_size = trainer.accumulate_grad_batches * trainer.world_size
        rates = ", ".join(f"{rate:g}" for rate in sorted(set(rates_before)))
        rates += " at its highest" if trainer.lr_scheduler_configs else ""
        changed = f"The effective batch went from {old * per_size} to {new * per_size} samples"
        advice = 'keep="effective" would keep the old one by gradient accumulation.'
        return [f"{changed}; the learning rate is still {rates}. {advice}"]


def _learning_rates(trainer: Trainer) -> list[float]:
    """Return the highest learning rate of each parameter group: a schedule may begin far below it."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [max(float(group[name]) for name in ("lr", "initial_lr", "max_lr") if name in group) for group in groups]


def _can_start(trainer: Trainer, settings: TunerSettings) -> bool:
    """Return whether trials of batch sizes can run. If not, print the reason.

    Raises:
        RuntimeError: The strategy or the model does not allow trials, or the device does not compute.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        _say(trainer, "skipped, because fast_dev_run=True keeps the batch size as it is.")
        return False
    reason = why_no_trials(trainer, trainer.lightning_module)
    if reason is not None:
        raise RuntimeError(f"BatchSizeTuner cannot run trials here: {reason}, and remove BatchSizeTuner.")
    device = trainer.strategy.root_device
    is_timed = settings.objective == "throughput"
    if is_timed and (VirtualDevice.current() is not None or computes_nothing(device)):
        raise RuntimeError(
            'BatchSizeTuner(objective="throughput") needs the real device: on a simulated one, steps take other times.'
        )
    if device.type == "cpu" and reader_for(device) is None and not is_timed:
        _say(trainer, "a CPU keeps no memory statistics, so the batch size stays as it is. Inside "
             "`with VirtualDevice('24GiB'):` it is found for that device.")  # fmt: skip
        return False
    return True


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        print_on_console(f"BatchSizeTuner: {text}")
