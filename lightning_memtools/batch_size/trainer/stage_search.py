"""The search for the batch sizes of a Trainer's stages, one stage after the other."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import loop_of, source_of
from lightning_memtools.batch_size.batch_size_result import SizeTrial, explain_that_nothing_fits
from lightning_memtools.batch_size.size_limits import SizeLimits, normalizes_batches, samples_per_rank
from lightning_memtools.batch_size.size_search import find_largest, largest_that_fits, next_size
from lightning_memtools.batch_size.trainer.size_cache import SizeCache
from lightning_memtools.batch_size.trainer.sized_sources import (
    BatchSizeAttributes,
    hint_to_leave_out,
    unwrap_sources,
    wrap_sources,
)
from lightning_memtools.batch_size.trainer.trial_runner import TrialRunner
from lightning_memtools.batch_size.trainer.tuner_settings import TunerSettings
from lightning_memtools.memory.peaks import Stage
from lightning_memtools.memory.quick_collections import quick_collections
from lightning_memtools.memory.readers import reader_for


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        found: For each stage the trial whose size is used.
        trials: All trials, in order.
        notes: Sentences for the report.
        accumulate: Micro-batches per optimizer step, where an effective batch size was given and training was tuned.
    """

    found: Mapping[Stage, SizeTrial]
    trials: Sequence[SizeTrial]
    notes: Sequence[str]
    accumulate: int | None

    @property
    def sizes(self) -> dict[Stage, int]:
        """Samples per batch and rank."""
        return {stage: trial.size for stage, trial in self.found.items()}


class StageSearch:
    """Searches stage after stage. Each size is written to `sizes`, from where the loops' sources read it.

    Args:
        trainer: In its hook that comes before a loop's work.
        settings: The arguments of BatchSizeTuner.
        sizes: The sizes that the sources read; they are changed.
        before: The sizes before the search.

    Attributes:
        doing: The trial that is run, in words.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: TunerSettings,
        *,
        sizes: dict[Stage, int | None],
        before: Mapping[Stage, int],
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._sizes = sizes
        self._before = before
        self._reader = reader_for(trainer.strategy.root_device)
        self._attributes = BatchSizeAttributes(trainer, settings.names)
        effective = settings.effective_batch_size
        self._per_rank = None if effective is None else samples_per_rank(effective, trainer.world_size)
        self._accumulate = trainer.accumulate_grad_batches
        self.doing = "preparing trials"

    def run(self, stages: Sequence[Stage], hooks: Sequence[Callable[[], None]], *, begins: bool) -> SearchResult:
        """Search for the stages' sizes.

        Args:
            stages: Stages that have data.
            hooks: Are called before the loop, as in a real run.
            begins: True if training has not begun.

        Raises:
            RuntimeError: Not even the smallest size fits.
            ValueError: No attribute holds the size, or the loaders do not follow it.
        """
        trainer, settings = self._trainer, self._settings
        if any(source_of(loop_of(trainer, stage)).is_module() for stage in stages):
            self._attributes.check()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        in_trials: list[Stage] = ["train", "val"] if is_fitting else list(stages)
        self._sizes.clear()
        self._sizes.update({stage: self._before.get(stage) for stage in in_trials})
        sources = wrap_sources(trainer, in_trials, self._attributes, self._sizes.get)
        trials: list[SizeTrial] = []
        notes: list[str] = []
        found: dict[Stage, SizeTrial] = {}
        with TemporaryDirectory(prefix="memtools-") as root:
            runner = TrialRunner(
                trainer, reader=self._reader, attributes=self._attributes, sources=sources, sizes=self._sizes,
                margin=settings.margin, accumulate_for=self._accumulate_for,
                validates=is_fitting and has_data(trainer, "val"), begins=begins, hooks=hooks,
                worst_case=settings.worst_case, root=root, owner=settings.owner,
            )  # fmt: skip
            cache = SizeCache.of(settings.cache, trainer, self._reader, self._facts(stages), settings.names)
            cached = cache.load()
            gc.collect()
            with quick_collections():
                for stage in stages:
                    if stage == "train" and "val" in stages:
                        # While training is tuned, validation runs with as little as it can.
                        self._sizes["val"] = self._limits("val").round_down(settings.init_val) or settings.multiple_of
                    limits = self._limits(stage)
                    of_stage = self._search(runner, stage, limits, cached.get(stage))
                    trials += of_stage
                    found[stage] = self._choose(stage, of_stage, runner)
                    notes += self._note_on_limits(stage, limits) + self._note_on_trials(stage, limits, of_stage)
                    notes += _notes_on_varying_data(stage, runner)
        cache.store({stage: trial.size for stage, trial in found.items()})
        is_set = self._per_rank is not None and "train" in found
        accumulate = self._accumulate_for(found["train"].size) if is_set else None
        return SearchResult(found=found, trials=tuple(trials), notes=tuple(notes), accumulate=accumulate)

    def _accumulate_for(self, size: int) -> int:
        """Returns the micro-batches per optimizer step that belong to a training size."""
        return self._accumulate if self._per_rank is None else max(self._per_rank // size, 1)

    def _search(self, runner: TrialRunner, stage: Stage, limits: SizeLimits, cached: int | None) -> list[SizeTrial]:
        """Verify a cached size with one trial; search where there is none, or where it does not fit."""
        numbers = itertools.count(1)

        def run(size: int) -> SizeTrial:
            self.doing = f"trying batches of {size} in {stage}, trial {next(numbers)}"
            return runner.run(stage, size, limits)

        trials = [] if cached is None else [run(cached)]
        if largest_that_fits(trials) is not None:
            return trials

        def run_limited(size: int) -> SizeTrial:
            trial = run(size)
            unlimited = all(reading.limit is None for reading in trial.readings)
            if unlimited and self._reader is not None and limits.max_val is None and limits.n_samples is None:
                raise ValueError(
                    f"Nothing limits the batch size: {self._reader.name} has no capacity, the data set has no length, "
                    "and max_val is None. Set max_val."
                )
            return trial

        left = max(self._settings.max_trials - len(trials), 1)
        return trials + find_largest(
            run_limited,
            start=self._settings.init_val,
            round_down=limits.round_down,
            smallest=limits.smallest,
            max_trials=left,
        )

    def _choose(self, stage: Stage, trials: Sequence[SizeTrial], runner: TrialRunner) -> SizeTrial:
        """Returns the trial with the largest size that fits, and sets this size.

        Raises:
            RuntimeError: None fits.
            ValueError: The loaders did not follow the sizes.
        """
        chosen = largest_that_fits(trials)
        if chosen is None:
            self._sizes[stage] = self._before.get(stage)
            unwrap_sources(self._trainer)
            raise RuntimeError(explain_that_nothing_fits(stage, trials))
        self._sizes[stage] = chosen.size
        reported = runner.loader_sizes.get(stage, {})
        if len(trials) > 1 and len(reported) > 1 and len(set(reported.values())) == 1:
            (size,) = set(reported.values())
            names = self._attributes.names_for(stage)
            raise ValueError(
                f"The {stage}_dataloader gives batches of {size} whatever {', '.join(names)} is (tried "
                f"{sorted(reported)}). Let the hook read it, as in DataLoader(..., batch_size=self.{names[0]})."
                + hint_to_leave_out(stage)
            )
        return chosen

    def _note_on_limits(self, stage: Stage, limits: SizeLimits) -> list[str]:
        """Returns a sentence if something else than memory and `max_val` forbids the next larger size."""
        size = self._sizes[stage] or 0
        reasons = limits.reasons_against(size + self._settings.multiple_of)
        notes = [f"The size for {stage} is limited by {' and '.join(reasons)}."] if reasons else []
        if stage == "train" and limits.n_samples is not None and size == limits.n_samples:
            notes.append(
                f"LIMITED BY THE SIZE OF THE DATASET: one batch of {size} is a whole epoch, so weights are updated "
                "once in it. Set max_val, or effective_batch_size, to the largest batch that you want to train with."
            )
        return notes

    def _note_on_trials(self, stage: Stage, limits: SizeLimits, trials: Sequence[SizeTrial]) -> list[str]:
        """Returns a sentence if the search would have gone on but for `max_trials`."""
        if len(trials) < self._settings.max_trials:
            return []
        following = next_size(trials, round_down=limits.round_down, smallest=limits.smallest(), left=1)
        if following is None:
            return []
        return [f"The search for {stage} ended with max_trials={len(trials)}; the next size to try was {following}."]

    def _limits(self, stage: Stage) -> SizeLimits:
        trainer, settings = self._trainer, self._settings
        min_batches = 1.0
        share, interval = getattr(trainer, f"limit_{stage}_batches"), trainer.val_check_interval
        if isinstance(share, float) and 0 < share < 1:
            min_batches = 1 / share
        if stage == "train" and type(interval) is int and trainer.check_val_every_n_epoch is not None:
            min_batches = max(min_batches, interval)
        return SizeLimits(
            max_val=settings.max_val,
            multiple_of=settings.multiple_of,
            per_rank=self._per_rank if stage == "train" else None,
            min_batches=min_batches,
            avoid_single=stage == "train" and normalizes_batches(trainer.lightning_module),
        )

    def _facts(self, stages: Sequence[Stage]) -> dict[str, Any]:
        """Returns the arguments that a size depends on."""
        settings = self._settings
        return {"margin": settings.margin, "max_val": settings.max_val, "multiple_of": settings.multiple_of,
                "effective_batch_size": settings.effective_batch_size, "stages": list(stages)}  # fmt: skip


def _notes_on_varying_data(stage: Stage, runner: TrialRunner) -> list[str]:
    """Returns what was seen where samples or batches vary in size without telling, and what would make it certain."""
    found = [sizes for (one, _), sizes in runner.sample_sizes.items() if one == stage and sizes is not None]
    measured = [sizes for sizes in found if sizes.vary and sizes.are_measured]
    exact = "Give the data set an attribute lengths, or a method worst_case(n), to have the largest batch for certain."
    notes = [f"The {stage} {one.described()}; trials used the largest." for one in measured]
    if any(not one.are_complete for one in measured):
        notes.append(exact)
    if not any(sizes.vary for sizes in found) and len(runner.batch_shapes.get(stage, ())) > 1:
        notes.append(f"The {stage} batches vary in shape, and a larger one than those in trials may not fit. {exact}")
    return notes


def has_data(trainer: Trainer, stage: Stage) -> bool:
    """Returns True if a stage has batches to run."""
    if not source_of(loop_of(trainer, stage)).is_defined():
        return False
    if stage == "val":
        return bool(trainer.enable_validation) if trainer.state.fn == TrainerFn.FITTING else True
    return bool(getattr(trainer, f"limit_{stage}_batches") != 0)
