"""The search of a Trainer's batch sizes, one stage after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import loop_of, source_of
from lightning_memtools.batch_size.limits import Limits, normalizes_batches, samples_per_rank
from lightning_memtools.batch_size.loaders import WorstCase
from lightning_memtools.batch_size.result import nothing_fits
from lightning_memtools.batch_size.search import best, find_largest
from lightning_memtools.batch_size.trainer.cache import SizeCache
from lightning_memtools.batch_size.trainer.places import Places
from lightning_memtools.batch_size.trainer.runner import TrialRunner
from lightning_memtools.batch_size.trainer.sources import unwrap_sources, wrap_sources
from lightning_memtools.batch_size.trials import Trial
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.stages import STAGES, Stage
from lightning_memtools.memory.stats import MemoryReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What BatchSizeTuner was given, checked; its docstring says what each means."""

    names: Sequence[str]
    margin: float
    init_val: int
    max_val: int | None
    multiple_of: int
    effective_batch_size: int | None
    max_trials: int
    cache: str | None
    worst_case: WorstCase | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What a search found: for each stage the trial whose size is used, all trials, and what a reader should know."""

    found: Mapping[Stage, Trial]
    trials: Sequence[Trial]
    notes: Sequence[str]
    accumulate: int | None

    @property
    def sizes(self) -> dict[Stage, int]:
        """Samples per batch and rank."""
        return {stage: trial.size for stage, trial in self.found.items()}


class Tuning:
    """Searches stage after stage; the sizes that were found are then in `sizes`, from where the loops' sources read.

    Args:
        trainer: In its hook that comes before a loop's work.
        settings: What to search for.
        sizes: Read by the sources; changed.
        before: The sizes before the search.
        owner: The tuner's type: its objects are not put back after trials.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: Settings,
        *,
        sizes: dict[Stage, int | None],
        before: Mapping[Stage, int],
        owner: type[Callback],
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._sizes = sizes
        self._before = before
        self._owner = owner
        self._reader = reader_for(trainer.strategy.root_device)
        self._places = Places(trainer, settings.names)
        effective = settings.effective_batch_size
        self._per_rank = None if effective is None else samples_per_rank(effective, trainer.world_size)
        self._accumulate = trainer.accumulate_grad_batches

    def run(self, stages: Sequence[Stage], hooks: Sequence[Callable[[], None]], *, begins: bool) -> Tuned:
        """Search for the stages' sizes.

        Args:
            stages: Of those, the ones that have data.
            hooks: What is still to be called before the loop, in a real run.
            begins: Whether training is still to begin.

        Raises:
            RuntimeError: Not even the smallest size fits.
            ValueError: There is no place for a size, or the loaders do not follow it.
        """
        trainer, settings = self._trainer, self._settings
        if any(source_of(loop_of(trainer, stage)).is_module() for stage in stages):
            self._places.check()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        fitting: list[Stage] = ["train", "val"] if is_fitting else list(stages)
        self._sizes.clear()
        self._sizes.update({stage: self._before.get(stage) for stage in fitting})
        sources = wrap_sources(trainer, fitting, self._places, self._sizes.get)
        trials: list[Trial] = []
        notes: list[str] = []
        found: dict[Stage, Trial] = {}
        with TemporaryDirectory(prefix="memtools-") as root:
            runner = TrialRunner(
                trainer, reader=self._reader, places=self._places, sources=sources, sizes=self._sizes,
                margin=settings.margin, accumulate_for=self.accumulate_for,
                validates=is_fitting and has_data(trainer, "val"), begins=begins, hooks=hooks,
                worst_case=settings.worst_case, root=root, owner=self._owner,
            )  # fmt: skip
            cache = SizeCache.of(settings.cache, trainer, self._reader, self._facts(stages), settings.names)
            known = cache.load()
            with runner:
                for stage in stages:
                    limits = self._limits(stage)
                    if stage == "train" and "val" in stages:
                        # Validation takes part while training is searched for, with as little as it can.
                        self._sizes["val"] = self._limits("val").round_down(settings.init_val) or settings.multiple_of
                    mine = self._search(runner, stage, limits, known.get(stage))
                    trials += mine
                    chosen = best(mine)
                    if chosen is None:
                        self._sizes[stage] = self._before.get(stage)
                        unwrap_sources(trainer)
                        raise RuntimeError(nothing_fits(stage, mine))
                    found[stage] = chosen
                    self._sizes[stage] = chosen.size
                    self._check_it_follows(mine, runner, stage)
                    cut = sorted(limits.cut - {"max_val"})
                    if limits.round_down(chosen.size + settings.multiple_of) <= chosen.size and cut:
                        notes.append(f"The size for {stage} is held down by {' and '.join(cut)}.")
        tuned = Tuned(
            found=found,
            trials=tuple(trials),
            notes=tuple(notes),
            accumulate=None if self._per_rank is None or "train" not in found
            else self.accumulate_for(found["train"].size),
        )  # fmt: skip
        cache.store(tuned.sizes)
        return tuned

    def accumulate_for(self, size: int) -> int:
        """Micro-batches per optimizer step that go with a training size."""
        return self._accumulate if self._per_rank is None else max(self._per_rank // size, 1)

    def _search(self, runner: TrialRunner, stage: Stage, limits: Limits, known: int | None) -> list[Trial]:
        """A size from the cache takes one trial; without one, or if it does not fit, sizes are searched for."""
        trials = [] if known is None else [runner.run(stage, known, limits)]
        if best(trials) is not None:
            return trials

        def run(size: int) -> Trial:
            trial = runner.run(stage, size, limits)
            unlimited = all(reading.limit is None for reading in trial.readings)
            if unlimited and self._reader is not None and limits.max_val is None and limits.n_samples is None:
                raise ValueError(
                    f"Nothing limits the batch size: {self._reader.name} has no capacity, the data set no length, and "
                    "max_val is None. Set max_val."
                )
            return trial

        left = max(self._settings.max_trials - len(trials), 1)
        return trials + find_largest(
            run, start=self._settings.init_val, round_down=limits.round_down, smallest=limits.smallest, max_trials=left
        )

    def _limits(self, stage: Stage) -> Limits:
        trainer, settings = self._trainer, self._settings
        min_batches = 1.0
        share, interval = getattr(trainer, f"limit_{stage}_batches"), trainer.val_check_interval
        if isinstance(share, float) and 0 < share < 1:
            min_batches = 1 / share
        if stage == "train" and type(interval) is int and trainer.check_val_every_n_epoch is not None:
            min_batches = max(min_batches, interval)
        return Limits(
            max_val=settings.max_val,
            multiple_of=settings.multiple_of,
            per_rank=self._per_rank if stage == "train" else None,
            min_batches=min_batches,
            avoid_single=stage == "train" and normalizes_batches(trainer.lightning_module),
        )

    def _check_it_follows(self, trials: Sequence[Trial], runner: TrialRunner, stage: Stage) -> None:
        """Raise if the loader gave the same batches whatever the attribute was."""
        seen = runner.loader_sizes.get(stage, {})
        if len(trials) > 1 and len(seen) > 1 and len(set(seen.values())) == 1:
            (size,) = set(seen.values())
            names = self._places.names_for(stage)
            raise ValueError(
                f"The {stage}_dataloader gives batches of {size} whatever {', '.join(names)} is (tried "
                f"{sorted(seen)}). Let the hook read it, as in DataLoader(..., batch_size=self.{names[0]})."
            )

    def _facts(self, stages: Sequence[Stage]) -> dict[str, Any]:
        """What a result depends on, besides the model, the data and the machine."""
        settings = self._settings
        return {"margin": settings.margin, "max_val": settings.max_val, "multiple_of": settings.multiple_of,
                "effective_batch_size": settings.effective_batch_size, "stages": list(stages)}  # fmt: skip


def has_data(trainer: Trainer, stage: Stage) -> bool:
    """Whether a stage has batches to run."""
    if not source_of(loop_of(trainer, stage)).is_defined():
        return False
    if stage == "val":
        return bool(trainer.enable_validation) if trainer.state.fn == TrainerFn.FITTING else True
    return bool(getattr(trainer, f"limit_{stage}_batches") != 0)


def sizes_before(trainer: Trainer, places: Places, found: Mapping[Stage, int]) -> dict[Stage, int]:
    """The sizes before a search: what attributes say, and of passed loaders what an earlier search has found."""
    sizes: dict[Stage, int] = {}
    for stage in STAGES:
        if source_of(loop_of(trainer, stage)).is_module():
            size = places.read(stage)
            if size is not None:
                sizes[stage] = size
        elif stage in found:
            sizes[stage] = found[stage]
    return sizes


def device_in_words(reader: MemoryReader | None) -> str:
    """A sentence for the report."""
    return "" if reader is None else f"On {reader.name}."
