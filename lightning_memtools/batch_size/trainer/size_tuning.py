"""Searches for batch sizes, puts them into effect, and collects the result."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from tempfile import TemporaryDirectory

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_memtools import _lightning
from lightning_memtools._lightning import callbacks_of, forget_loaders, loop_of, source_of
from lightning_memtools._torch import AnyBatchNorm
from lightning_memtools.batch_size.batch_size_result import BatchSizeResult, SizeTrial, explain_that_nothing_fits
from lightning_memtools.batch_size.size_limits import SizeLimits, TunerSettings
from lightning_memtools.batch_size.size_search import find_largest, largest_that_fits, next_size
from lightning_memtools.batch_size.trainer import sized_sources
from lightning_memtools.batch_size.trainer.sized_sources import BatchSizeAttributes, SizedSources
from lightning_memtools.batch_size.trainer.trial_probe import ANOTHER_ERROR
from lightning_memtools.batch_size.trainer.trial_runner import CacheReleaser, TrialRunner, takes_part
from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.peaks import STAGES, Stage
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.memory.virtual import put_on_device
from lightning_memtools.reporting.console import print_on_console, progress_printed
from lightning_memtools.reporting.files import report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.state.random_state import random_streams_restored
from lightning_memtools.state.state_snapshot import StateSnapshot

# The samples of validation batches while training is tuned, and the first size where none is configured.
_FEW = 2


class SizeTuning:
    """The batch sizes of a Trainer's stages: searches for them, puts them into effect, and knows them for checkpoints.

    Args:
        settings: The arguments of BatchSizeTuner.

    Attributes:
        found: The sizes that were found, in this run or in the one that is resumed.
        accumulate: Micro-batches per optimizer step that go with them; None to leave the Trainer's.
        cache_releaser: Empties the cache between training and validation; None where both fit beside each other.
    """

    def __init__(self, settings: TunerSettings) -> None:
        self.settings = settings
        self.found: dict[Stage, int] = {}
        self.accumulate: int | None = None
        self.cache_releaser: CacheReleaser | None = None
        self._sources: SizedSources | None = None

    def begin_fit(self, trainer: Trainer, later: Sequence[Callback]) -> BatchSizeResult | None:
        """Search before a fit trains, or use the sizes that are known; return the result of a search.

        Args:
            trainer: In its hook that comes before a fit.
            later: The callbacks whose hooks before a fit are still to come; they are called before each trial.
        """
        stages = [stage for stage in ("train", "val") if stage in self.settings.stages]
        if not stages or not _can_start(trainer):
            return None
        module = trainer.lightning_module
        hooks: list[Callable[[], None]] = [
            *(lambda c=callback: c.on_fit_start(trainer, module) for callback in later if takes_part(callback)),
            module.on_fit_start,
        ]
        result = self._begin(trainer, [stage for stage in STAGES if stage in stages], hooks)
        put_on_device(module, trainer.optimizers)
        return result

    def begin_evaluation(self, trainer: Trainer, stage: Stage) -> BatchSizeResult | None:
        """Search before a call of validate, test or predict, or use a known size; return the result of a search."""
        put_on_device(trainer.lightning_module, trainer.optimizers)
        if stage not in self.settings.stages or not _can_start(trainer):
            return None
        result = self._begin(trainer, [stage], ())
        loop = loop_of(trainer, stage)
        with random_streams_restored():
            forget_loaders(loop)
            loop.setup_data()
            loop.reset()
        return result

    def give_up(self, trainer: Trainer) -> None:
        """Have the fit or evaluation go on as if there had been no search."""
        self.undo()
        put_on_device(trainer.lightning_module, trainer.optimizers)
        for stage in _stages_of(trainer):
            forget_loaders(loop_of(trainer, stage))

    def undo(self) -> None:
        """Have the loops request their loaders as before. The sizes stay as they were found. Idempotent."""
        if self._sources is not None:
            self._sources.undo()
        self._sources = self.cache_releaser = None

    def _begin(
        self, trainer: Trainer, stages: Sequence[Stage], hooks: Sequence[Callable[[], None]]
    ) -> BatchSizeResult | None:
        attributes = BatchSizeAttributes(trainer, self.settings.names)
        self._sources = SizedSources(trainer, attributes)
        hooked = [stage for stage in _stages_of(trainer) if source_of(loop_of(trainer, stage)).is_module()]
        before = {stage: size for stage in hooked if (size := attributes.read(stage)) is not None}
        if stages[0] not in self.found:
            return self._search(trainer, stages, attributes, before, hooks)
        stages = [stage for stage in stages if stage in self.found]
        self._apply(trainer, stages, attributes, before)
        self.cache_releaser = CacheReleaser(reader_for(trainer.strategy.root_device))
        sizes = ", ".join(f"{stage} {self.found[stage]}" for stage in stages)
        _say(trainer, f"using the sizes found before: {sizes}.")
        return None

    def _search(
        self,
        trainer: Trainer,
        stages: Sequence[Stage],
        attributes: BatchSizeAttributes,
        before: Mapping[Stage, int],
        hooks: Sequence[Callable[[], None]],
    ) -> BatchSizeResult:
        """Search for the sizes of the stages that have data, put them into effect, and report them.

        Raises:
            RuntimeError: Not even the smallest size fits.
            ValueError: No attribute holds the size, or the loaders do not follow it.
        """
        directory = report_directory(trainer)  # collective, so before the ranks differ
        began_at, reader = time.perf_counter(), reader_for(trainer.strategy.root_device)
        stages = [stage for stage in stages if sized_sources.has_data(trainer, stage)]
        if any(source_of(loop_of(trainer, stage)).is_module() for stage in stages):
            attributes.check()
        passed = {stage: sized_sources.size_of_passed(trainer, stage) for stage in stages}
        search = _Search(trainer, self.settings, {stage: before.get(stage) or passed[stage] for stage in stages})
        assert self._sources is not None
        gc.collect()
        is_shown = trainer.is_global_zero
        shows = progress_printed(lambda: f"BatchSizeTuner is {search.doing}") if is_shown else nullcontext()
        with shows, _left_out_of_counts(trainer, reader), TemporaryDirectory(prefix="memtools-") as root, gc_frozen():
            runner = TrialRunner(
                trainer, search.settings, attributes, self._sources, before, hooks=hooks, root=root,
                not_restored=SizeTuning,
            )  # fmt: skip
            search.run(runner, stages)
        self.found |= {stage: trial.size for stage, trial in search.found.items()}
        if search.settings.effective_batch_size is not None and "train" in search.found:
            self.accumulate = runner.accumulate_for(self.found["train"])
        self._apply(trainer, stages, attributes, before)
        limit, here = self.settings.limit(reader), trainer.global_rank
        is_tight = limit is None or sum(trial.readings[here].peak or 0 for trial in search.found.values()) > limit
        self.cache_releaser = CacheReleaser(reader) if is_tight else None
        result = BatchSizeResult(
            sizes={str(stage): trial.size for stage, trial in search.found.items()},
            trials=tuple(search.trials),
            peaks={str(stage): trial.tightest.peak for stage, trial in search.found.items()},
            accumulate=trainer.accumulate_grad_batches,
            seconds=time.perf_counter() - began_at,
            device="" if reader is None else f"On {reader.name}.",
            n_ranks=trainer.world_size,
            notes=(*search.notes, *self._notes_on_steps(trainer, search)),
        )
        if trainer.is_global_zero:
            write_report_or_warn(directory, "batch_size.md", result.markdown())
            log_text(trainer, "memtools/batch_size", result.markdown(), _lightning.training_step(trainer))
            print_on_console("\n  ".join([f"BatchSizeTuner: {result.summary()}", *result.notes]))
        return result

    def _apply(
        self, trainer: Trainer, stages: Sequence[Stage], attributes: BatchSizeAttributes, before: Mapping[Stage, int]
    ) -> None:
        """Write the sizes, and have the loaders made for them; in a fit the optimizers and schedulers too."""
        assert self._sources is not None
        for stage in stages:
            # Attributes that several stages share get training's size.
            has_own = any(name.startswith(f"{stage}_") for name in attributes.names_for(stage))
            if has_own or stage == "train" or len(stages) == 1:
                attributes.write(stage, self.found[stage], for_loggers=True)
        for stage, size in {**before, **{stage: self.found[stage] for stage in stages}}.items():
            self._sources.set(stage, size)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.accumulate is not None:
            trainer.accumulate_grad_batches = self.accumulate
        for stage in _stages_of(trainer):
            forget_loaders(loop_of(trainer, stage))
        # A scheduler may depend on the number of steps. To know it, it may have had the loaders made, which draws
        # random numbers: they are drawn once.
        sources = [source_of(loop_of(trainer, stage)) for stage in _stages_of(trainer)]
        streams = StateSnapshot([source.instance for source in sources if not source.is_module()])
        trainer.strategy.setup_optimizers(trainer)
        trainer.strategy.setup_precision_plugin()
        streams.restore()

    def _notes_on_steps(self, trainer: Trainer, search: _Search) -> list[str]:
        """Return notes on the samples per optimizer step, which the learning rate belongs to."""
        old, new = search.configured.get("train"), self.found.get("train")
        if "train" not in search.found or new is None:
            return []
        per_size = trainer.accumulate_grad_batches * trainer.world_size
        if any(is_learning_rate_finder(callback) for callback in callbacks_of(trainer)):
            return [f"The learning rate that LearningRateFinder finds belongs to steps of {new * per_size} samples."]
        if old in {None, new} or self.accumulate is not None:
            return []
        changed = (
            f"A step went from {(old or 0) * per_size} to {new * per_size} samples. The learning rate is the one of"
        )
        return [f'{changed} configure_optimizers; keep="effective" keeps the old number by gradient accumulation.']


class _Search:
    """Searches stage after stage.

    Args:
        trainer: In its hook that comes before a loop's work.
        settings: The arguments of BatchSizeTuner.
        configured: The sizes before the search: no smaller one is chosen if they run.

    Attributes:
        doing: The trial that is run, in words.
        found: For each stage the trial whose size is used.
        trials: All trials, in order.
        notes: Sentences for the report.

    Raises:
        ValueError: The samples per step that are to be kept are not known.
    """

    def __init__(self, trainer: Trainer, settings: TunerSettings, configured: Mapping[Stage, int | None]) -> None:
        self._trainer, self.settings, self.configured = trainer, settings, configured
        self.doing = "preparing trials"
        self.found: dict[Stage, SizeTrial] = {}
        self.trials: list[SizeTrial] = []
        self.notes: list[str] = []
        if settings.keep == "effective" and trainer.state.fn == TrainerFn.FITTING:
            size = configured.get("train")
            if size is None:
                raise ValueError('keep="effective": the configured batch size is not known. Give effective_batch_size.')
            kept = size * trainer.accumulate_grad_batches * trainer.world_size
            self.settings = replace(settings, keep="learning_rate", effective_batch_size=kept)

    def run(self, runner: TrialRunner, stages: Sequence[Stage]) -> None:
        """Search for the stages' sizes.

        Raises:
            RuntimeError: Not even the smallest size fits.
        """
        for stage in stages:
            limits = self._limits(stage, runner.per_rank)
            if stage == "train" and "val" in stages:
                # While training is tuned, validation runs with as little as it can.
                least = self._limits("val").round_down(self.settings.init_val or _FEW)
                runner.sizes["val"] = least or self.settings.multiple_of
            trials = self._search(runner, stage, limits)
            self.trials += trials
            chosen = largest_that_fits(trials)
            if chosen is None:
                raise RuntimeError(explain_that_nothing_fits(stage, trials))
            runner.sizes[stage] = chosen.size
            self.found[stage] = chosen
            self.notes += self._notes_on_limits(chosen, limits, trials) + _notes_on_varying_data(stage, runner)

    def _search(self, runner: TrialRunner, stage: Stage, limits: SizeLimits) -> list[SizeTrial]:
        most, configured = self.settings.max_trials, self.configured.get(stage)
        ran: list[SizeTrial] = []

        def run(size: int) -> SizeTrial:
            self.doing = f"trying batches of {size} in {stage}, trial {len(ran) + 1} of at most {most}"
            trial = runner.run(stage, size, limits, is_bound=any(before.ended for before in ran))
            ran.append(replace(trial, is_configured=trial.size == configured))
            is_unlimited = all(reading.limit is None and reading.peak is not None for reading in trial.readings)
            if is_unlimited and limits.max_val is None and limits.n_samples is None:
                raise ValueError(
                    "Nothing limits the batch size: the device has no capacity, the data set has no length, and "
                    "max_val is None. Set max_val."
                )
            return ran[-1]

        start = [size for size in (self.settings.init_val, configured) if size] or [_FEW]
        return find_largest(run, start=start, limits=limits, max_trials=most)

    def _notes_on_limits(self, chosen: SizeTrial, limits: SizeLimits, trials: Sequence[SizeTrial]) -> list[str]:
        """Return notes on limits other than memory and `max_val` that ended the search."""
        size, stage = chosen.size, chosen.stage
        reasons = limits.reasons_against(size + self.settings.multiple_of)
        notes = [f"The size for {stage} is limited by {' and '.join(reasons)}."] if reasons else []
        if stage == "train" and size == limits.n_samples:
            notes.append(
                f"LIMITED BY THE SIZE OF THE DATASET: one batch of {size} is a whole epoch, so weights are updated "
                "once in it. Set max_val, or effective_batch_size, to the largest batch that you want to train with."
            )
        failed = next((trial for trial in trials if trial.outcome.startswith(ANOTHER_ERROR)), None)
        if failed is not None:
            notes.append(f"A batch of {failed.size} in {stage} ended with {failed.outcome}. The size stays below.")
        if chosen.is_within_margin:
            notes.append(
                f"Batches of {size} in {stage}, as configured, run but leave less than the margin free. A larger model "
                "or sample may run out of memory."
            )
        following = next_size(trials, limits, left=1) if len(trials) >= self.settings.max_trials else None
        if following is not None:
            notes.append(f"The search for {stage} ended with max_trials; the next size to try was {following}.")
        return notes

    def _limits(self, stage: Stage, per_rank: int | None = None) -> SizeLimits:
        trainer, is_train = self._trainer, stage == "train"
        min_batches = 1.0
        share, interval = getattr(trainer, f"limit_{stage}_batches"), trainer.val_check_interval
        if isinstance(share, float) and 0 < share < 1:
            min_batches = 1 / share
        if is_train and type(interval) is int and trainer.check_val_every_n_epoch is not None:
            min_batches = max(min_batches, interval)
        norms = [module for module in trainer.lightning_module.modules() if isinstance(module, AnyBatchNorm)]
        return SizeLimits(
            max_val=self.settings.max_val,
            multiple_of=self.settings.multiple_of,
            per_rank=per_rank if is_train else None,
            min_batches=min_batches,
            avoid_single=is_train and any(norm.training for norm in norms),
        )


def is_learning_rate_finder(callback: Callback) -> bool:
    """Return True for Lightning's LearningRateFinder."""
    return any(kind.__name__ == "LearningRateFinder" for kind in type(callback).__mro__)


def why_no_trials(trainer: Trainer, module: LightningModule) -> str | None:
    """Return why no trial can be run with this strategy and model; None where trials can be run."""
    if trainer.world_size > 1 and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        return (
            "SyncBatchNorm exchanges statistics in every forward, and a rank that runs out of memory in a trial would "
            "leave the others waiting. Tune with sync_batchnorm=False (its memory is the same but for a few vectors) "
            "and set the size that is found"
        )
    return why_unsupported("BatchSizeTuner", type(trainer.strategy))


def _can_start(trainer: Trainer) -> bool:
    """Return True if trials of batch sizes can run. If not, print the reason.

    Raises:
        RuntimeError: The strategy or the model does not allow trials.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        _say(trainer, "skipped, because fast_dev_run=True keeps the batch size as it is.")
        return False
    reason = why_no_trials(trainer, trainer.lightning_module)
    if reason is not None:
        raise RuntimeError(f"BatchSizeTuner cannot run trials here: {reason}, and remove BatchSizeTuner.")
    device = trainer.strategy.root_device
    if device.type == "cpu" and reader_for(device) is None:
        _say(trainer, "a CPU keeps no memory statistics, so the batch size stays as it is. Inside "
             "`with VirtualDevice('24GiB'):` it is found for that device.")  # fmt: skip
        return False
    return True


@contextmanager
def _left_out_of_counts(trainer: Trainer, reader: MemoryReader | None) -> Iterator[None]:
    """Keep allocation retries and out-of-memory errors that happen within out of the counts of the run."""
    before = MemoryStats() if reader is None else reader.stats()
    try:
        yield
    finally:
        now = MemoryStats() if reader is None else reader.stats()
        retries, ooms = ((getattr(now, n) or 0) - (getattr(before, n) or 0) for n in ("alloc_retries", "ooms"))
        for callback in callbacks_of(trainer):
            if isinstance(callback, Neighbour):
                callback.leave_out_of_counts(alloc_retries=retries, ooms=ooms)


def _notes_on_varying_data(stage: Stage, runner: TrialRunner) -> list[str]:
    """Return notes on data whose sizes vary without being declared, and on how to make the result certain."""
    known = [sizes for (other, _), sizes in runner.sample_sizes.items() if other == stage and sizes is not None]
    measured = [sizes for sizes in known if sizes.vary and sizes.are_measured]
    exact = "Give the data set an attribute lengths, or a method worst_case(n), to have the largest batch for certain."
    notes = [f"The {stage} {sizes.described()}; trials used the largest." for sizes in measured]
    if not all(sizes.are_complete for sizes in measured):
        notes.append(exact)
    if not any(sizes.vary for sizes in known) and len(runner.batch_shapes.get(stage, ())) > 1:
        notes.append(f"The {stage} batches vary in shape, and a larger one than those in trials may not fit. {exact}")
    return notes


def _stages_of(trainer: Trainer) -> tuple[Stage, ...]:
    """Return the stages whose loops a call of the Trainer runs."""
    return ("train", "val") if trainer.state.fn == TrainerFn.FITTING else (_lightning.running_stage(trainer),)


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        print_on_console(f"BatchSizeTuner: {text}")
