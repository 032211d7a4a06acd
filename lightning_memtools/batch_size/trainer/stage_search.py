"""The search for the batch sizes of a Trainer's stages, one stage after the other."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import loop_of, source_of
from lightning_memtools.batch_size.batch_size_result import SizeTrial, explain_that_nothing_fits
from lightning_memtools.batch_size.size_limits import SizeLimits, TunerSettings, normalizes_batches
from lightning_memtools.batch_size.size_search import find_largest, largest_that_fits, next_size
from lightning_memtools.batch_size.trainer.sized_sources import (
    BatchSizeAttributes,
    hint_to_leave_out,
    unwrap_sources,
)
from lightning_memtools.batch_size.trainer.trial_probe import ANOTHER_ERROR
from lightning_memtools.batch_size.trainer.trial_runner import TrialRunner
from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.peaks import Stage

_NEARLY_AS_FAST = 0.97
# The samples of validation batches while training is tuned.
_FEW = 2


class StageSearch:
    """Searches stage after stage. Each size is written to `sizes`, from where the loops' sources read it.

    Args:
        trainer: In its hook that comes before a loop's work.
        settings: The arguments of BatchSizeTuner.
        attributes: Hold the batch size.
        sizes: The sizes that the sources read: those before the search, and in the end those that were found.
        configured: The user's own sizes: no smaller one is chosen if they run.
        not_restored: The type of objects that keep the results of trials.

    Attributes:
        doing: The trial that is run, in words.
        found: For each stage the trial whose size is used.
        trials: All trials, in order.
        notes: Sentences for the report.
        accumulate: Micro-batches per optimizer step, where an effective batch size was given and training was tuned.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: TunerSettings,
        attributes: BatchSizeAttributes,
        sizes: dict[Stage, int | None],
        *,
        configured: Mapping[Stage, int | None],
        not_restored: type,
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._attributes = attributes
        self._sizes = sizes
        self._not_restored = not_restored
        self._before = dict(sizes)
        self._configured = configured
        self._began_at = time.perf_counter()
        self.doing = "preparing trials"
        self.found: dict[Stage, SizeTrial] = {}
        self.trials: list[SizeTrial] = []
        self.notes: list[str] = []
        self.accumulate: int | None = None

    def run(self, stages: Sequence[Stage], hooks: Sequence[Callable[[], None]], *, begins: bool) -> None:
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
        in_trials: list[Stage] = ["train", "val"] if trainer.state.fn == TrainerFn.FITTING else list(stages)
        with TemporaryDirectory(prefix="memtools-") as root:
            runner = TrialRunner(
                trainer, settings, self._attributes, self._sizes, in_trials, begins=begins, hooks=hooks, root=root,
                not_restored=self._not_restored,
            )  # fmt: skip
            gc.collect()
            with gc_frozen():
                for stage in stages:
                    limits = self._limits(stage, runner.per_rank)
                    if stage == "train" and "val" in stages:
                        # While training is tuned, validation runs with as little as it can.
                        least = self._limits("val").round_down(settings.init_val or _FEW)
                        self._sizes["val"] = least or settings.multiple_of
                    trials = self._search(runner, stage, limits)
                    self.found[stage] = self._choose(stage, trials, runner)
                    if stage == "train" and settings.objective == "throughput":
                        self.found[stage] = self._fastest(trials, runner, limits)
                        self._sizes[stage] = self.found[stage].size
                    self.trials += trials
                    self.notes += self._notes_on_limits(stage, limits, trials) + _notes_on_varying_data(stage, runner)
        if settings.effective_batch_size is not None and "train" in self.found:
            self.accumulate = runner.accumulate_for(self.found["train"].size)

    def _search(self, runner: TrialRunner, stage: Stage, limits: SizeLimits) -> list[SizeTrial]:
        settings, numbers = self._settings, itertools.count(1)
        configured = self._configured.get(stage)
        has_run = False

        def run(size: int) -> SizeTrial:
            nonlocal has_run
            self.doing = f"trying batches of {size} in {stage}, trial {next(numbers)} of at most {settings.max_trials}"
            trial = runner.run(stage, size, limits, is_bound=has_run)
            has_run |= not any(reading.failure for reading in trial.readings)
            if trial.size == configured:
                trial = replace(trial, is_configured=True)
            is_unlimited = all(reading.limit is None and reading.peak is not None for reading in trial.readings)
            if is_unlimited and limits.max_val is None and limits.n_samples is None:
                raise ValueError(
                    "Nothing limits the batch size: the device has no capacity, the data set has no length, and "
                    "max_val is None. Set max_val."
                )
            return trial

        def goes_on(trials: Sequence[SizeTrial]) -> bool:
            if settings.objective == "throughput" and trials[-1].tightest.peak is None:
                return _is_near_best(trials[-1], trials)  # nothing tells where memory ends
            spent = time.perf_counter() - self._began_at
            if settings.max_time is None or spent + trials[-1].seconds <= settings.max_time:
                return True
            self.notes.append(
                f"The search for {stage} ended with max_time={settings.max_time:g}: {spent:.0f} s had passed, and the "
                f"last trial took {trials[-1].seconds:.0f} s."
            )
            return largest_that_fits(trials) is None

        return find_largest(
            run,
            start=[one for one in (settings.init_val, configured) if one] or [_FEW],
            round_down=limits.round_down,
            smallest=limits.smallest,
            max_trials=settings.max_trials,
            precision=settings.precision,
            goes_on=goes_on,
        )

    def _fastest(self, trials: list[SizeTrial], runner: TrialRunner, limits: SizeLimits) -> SizeTrial:
        """Return the trial of the smallest size that trains nearly as many samples per second as any that fits.

        Sizes that are halves of one another are run and added to the trials: from the largest that fits down to the
        configured one, as long as they do not get slower.
        """
        least = max(self._configured.get("train") or 1, limits.smallest())
        size = self.found["train"].size // 2
        while limits.round_down(size) >= least:
            size = limits.round_down(size)
            if all(trial.size != size for trial in trials):
                self.doing = f"timing batches of {size} in train"
                trials.append(runner.run("train", size, limits))
            if not _is_near_best(trials[-1], trials):
                break
            size //= 2
        fast = [trial for trial in trials if trial.fits and trial.size >= least and _is_near_best(trial, trials)]
        return min(fast, key=lambda trial: trial.size, default=self.found["train"])

    def _choose(self, stage: Stage, trials: Sequence[SizeTrial], runner: TrialRunner) -> SizeTrial:
        """Return the trial with the largest size that fits, and sets this size.

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

    def _notes_on_limits(self, stage: Stage, limits: SizeLimits, trials: Sequence[SizeTrial]) -> list[str]:
        """Return notes on limits other than memory and `max_val` that ended the search."""
        size = self.found[stage].size
        reasons = limits.reasons_against(size + self._settings.multiple_of)
        notes = [f"The size for {stage} is limited by {' and '.join(reasons)}."] if reasons else []
        if stage == "train" and size == limits.n_samples:
            notes.append(
                f"LIMITED BY THE SIZE OF THE DATASET: one batch of {size} is a whole epoch, so weights are updated "
                "once in it. Set max_val, or effective_batch_size, to the largest batch that you want to train with."
            )
        failed = next((one for one in trials if one.outcome.startswith(ANOTHER_ERROR)), None)
        if failed is not None:
            notes.append(f"A batch of {failed.size} in {stage} ended with {failed.outcome}. The size stays below.")
        if self.found[stage].is_within_margin:
            notes.append(
                f"Batches of {size} in {stage}, as configured, run but leave less than the margin free. A larger model "
                "or sample may run out of memory."
            )
        if len(trials) >= self._settings.max_trials:
            next_one = next_size(
                trials,
                round_down=limits.round_down,
                smallest=limits.smallest(),
                left=1,
                precision=self._settings.precision,
            )
            if next_one is not None:
                notes.append(
                    f"The search for {stage} ended with max_trials={len(trials)}; the next size to try was {next_one}."
                )
        return notes

    def _limits(self, stage: Stage, per_rank: int | None = None) -> SizeLimits:
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
            per_rank=per_rank if stage == "train" else None,
            min_batches=min_batches,
            avoid_single=stage == "train" and normalizes_batches(trainer.lightning_module),
        )


def _is_near_best(trial: SizeTrial, trials: Sequence[SizeTrial]) -> bool:
    """Return True if a size trains at least 97% of the samples per second of the best size that fits."""
    best = max((one.samples_per_second or 0.0 for one in trials if one.fits), default=0.0)
    return (trial.samples_per_second or 0.0) >= _NEARLY_AS_FAST * best


def _notes_on_varying_data(stage: Stage, runner: TrialRunner) -> list[str]:
    """Return notes on data whose sizes vary without being declared, and on how to make the result certain."""
    found = [sizes for (one, _), sizes in runner.sample_sizes.items() if one == stage and sizes is not None]
    measured = [sizes for sizes in found if sizes.vary and sizes.are_measured]
    exact = "Give the data set an attribute lengths, or a method worst_case(n), to have the largest batch for certain."
    notes = [f"The {stage} {one.described()}; trials used the largest." for one in measured]
    if any(not one.are_complete for one in measured):
        notes.append(exact)
    if not any(sizes.vary for sizes in found) and len(runner.batch_shapes.get(stage, ())) > 1:
        notes.append(f"The {stage} batches vary in shape, and a larger one than those in trials may not fit. {exact}")
    return notes
