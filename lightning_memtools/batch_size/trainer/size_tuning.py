"""Searches for batch sizes, puts them into effect, and collects the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import forget_loaders, loop_of, source_of
from lightning_memtools.batch_size.batch_size_result import BatchSizeResult
from lightning_memtools.batch_size.size_limits import limit_of
from lightning_memtools.batch_size.trainer.applied_sizes import (
    CacheReleaser,
    OptimizerSetup,
    forget_fit_loaders,
    renew_fit_loaders,
    renew_schedulers,
    write_sizes,
)
from lightning_memtools.batch_size.trainer.sized_sources import BatchSizeAttributes, unwrap_sources, wrap_sources
from lightning_memtools.batch_size.trainer.stage_search import StageSearch, TunerSettings, has_data
from lightning_memtools.batch_size.trainer.trial_isolation import left_out_of_counts
from lightning_memtools.memory.peaks import STAGES, Stage
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.state.random_state import random_streams_restored


class SizeTuning:
    """The batch sizes of a Trainer's stages: searches for them, puts them into effect, and knows them for checkpoints.

    Attributes:
        found: The sizes that were found, in this run or in the one that is resumed.
        accumulate: Micro-batches per optimizer step that go with them; None to leave the Trainer's.
        optimizer_setup: Repeats the setup of optimizers for the size that was found.
        cache_releaser: Releases the cache between training and validation; None before sizes are known.
    """

    def __init__(self) -> None:
        self.found: dict[Stage, int] = {}
        self.accumulate: int | None = None
        self.optimizer_setup = OptimizerSetup()
        self.cache_releaser: CacheReleaser | None = None
        # Read by the loops' sources, which outlive a search.
        self._sizes: dict[Stage, int | None] = {}

    def search(
        self,
        trainer: Trainer,
        settings: TunerSettings,
        stages: Sequence[Stage],
        hooks: Sequence[Callable[[], None]] = (),
        *,
        begins: bool = False,
    ) -> BatchSizeResult:
        """Search for the sizes of the stages that have data, and put them into effect.

        Args:
            trainer: In its hook that comes before a loop's work.
            settings: The arguments of BatchSizeTuner.
            stages: The stages to tune.
            hooks: Are called before the loop, as in a real run.
            begins: True if a fit has not begun to train.
        """
        began_at = time.perf_counter()
        reader = reader_for(trainer.strategy.root_device)
        attributes = BatchSizeAttributes(trainer, settings.names)
        tuned: list[Stage] = [stage for stage in STAGES if stage in stages and has_data(trainer, stage)]
        before = self._sizes_before(trainer, attributes)
        rates = _learning_rates(trainer)
        with left_out_of_counts(trainer, reader):
            search = StageSearch(trainer, settings, sizes=self._sizes, before=before)
            result = search.run(tuned, hooks, begins=begins)
        self.found = {**self.found, **result.sizes}
        if result.accumulate is not None:
            self.accumulate = result.accumulate
        self._apply(trainer, attributes, tuned, begins=begins)
        peaks = {stage: trial.readings[trainer.global_rank].peak for stage, trial in result.found.items()}
        self.cache_releaser = CacheReleaser(reader, _limit(reader, settings), peaks)
        notes = [*result.notes]
        if settings.effective_batch_size is None:
            notes += self._note_on_learning_rate(trainer, before, rates)
        if not begins and "train" in result.found and renew_schedulers(trainer):
            notes.append("The learning-rate schedule was built again for the new number of steps.")
        return BatchSizeResult(
            sizes={str(stage): size for stage, size in result.sizes.items()},
            trials=result.trials,
            peaks={stage: trial.tightest.peak for stage, trial in result.found.items()},
            accumulate=trainer.accumulate_grad_batches,
            seconds=time.perf_counter() - began_at,
            device="" if reader is None else f"On {reader.name}.",
            n_ranks=trainer.world_size,
            notes=tuple(notes),
        )

    def reuse(self, trainer: Trainer, settings: TunerSettings) -> None:
        """Put the sizes of an earlier search, or of the run that is resumed, into effect before a fit."""
        attributes = BatchSizeAttributes(trainer, settings.names)
        self._sizes = {**self._sizes_before(trainer, attributes), **self.found}
        wrap_sources(trainer, ["train", "val"], attributes, self._sizes.get)
        self._apply(trainer, attributes, self.found_in_fit(), begins=True)
        reader = reader_for(trainer.strategy.root_device)
        self.cache_releaser = CacheReleaser(reader, _limit(reader, settings), {})

    def reuse_in_evaluation(self, trainer: Trainer, settings: TunerSettings, stage: Stage) -> None:
        """Use the size of an earlier search in a call of validate, test or predict."""
        self._sizes[stage] = self.found[stage]
        wrap_sources(trainer, [stage], BatchSizeAttributes(trainer, settings.names), self._sizes.get)

    def found_in_fit(self) -> list[Stage]:
        """Returns those of train and val whose size is known."""
        return [stage for stage in STAGES if stage in self.found and stage in {"train", "val"}]

    def undo(self, trainer: Trainer) -> None:
        """Have the loops request their loaders as before. The sizes stay as they were found. Twice does no harm."""
        unwrap_sources(trainer)
        self.optimizer_setup.forget(trainer)
        self.cache_releaser = None

    def _apply(
        self, trainer: Trainer, attributes: BatchSizeAttributes, stages: Sequence[Stage], *, begins: bool
    ) -> None:
        """Write the sizes; in a fit, have its loaders (and before it begins, its optimizers) made for them."""
        write_sizes(attributes, stages, self.found)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.accumulate is not None:
            trainer.accumulate_grad_batches = self.accumulate
        if begins:
            forget_fit_loaders(trainer)
            self.optimizer_setup.repeat(trainer)
        else:
            renew_fit_loaders(trainer)

    def _sizes_before(self, trainer: Trainer, attributes: BatchSizeAttributes) -> dict[Stage, int]:
        """Returns the present sizes: those of attributes, and for passed loaders those of an earlier search."""
        sizes: dict[Stage, int] = {}
        for stage in STAGES:
            from_hook = source_of(loop_of(trainer, stage)).is_module()
            size = attributes.read(stage) if from_hook else self.found.get(stage)
            if size is not None:
                sizes[stage] = size
        return sizes

    def _note_on_learning_rate(
        self, trainer: Trainer, before: Mapping[Stage, int], rates_before: Sequence[float]
    ) -> list[str]:
        old, new = before.get("train"), self.found.get("train")
        if old is None or new is None or old == new or _learning_rates(trainer) != rates_before:
            return []
        per_size = trainer.accumulate_grad_batches * trainer.world_size
        rates = ", ".join(f"{rate:g}" for rate in sorted(set(rates_before)))
        changed = f"The effective batch went from {old * per_size} to {new * per_size} samples"
        advice = f"effective_batch_size={old * per_size} would keep the old one."
        return [f"{changed}; the learning rate is still {rates}. {advice}"]


def restart_evaluation_loop(trainer: Trainer, stage: Stage) -> None:
    """Have an evaluation loop that is about to run make its loaders again, with the size that was found."""
    loop = loop_of(trainer, stage)
    with random_streams_restored():
        forget_loaders(loop)
        loop.setup_data()
        loop.reset()


def _limit(reader: MemoryReader | None, settings: TunerSettings) -> int | None:
    capacity = None if reader is None else reader.stats().capacity
    return None if capacity is None else limit_of(capacity, settings.margin)


def _learning_rates(trainer: Trainer) -> list[float]:
    return [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
