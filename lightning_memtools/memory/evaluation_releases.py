"""Releases memory around a run's evaluations, reads what stays allocated, and warns of what grows."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools._torch import tree_leaves
from lightning_memtools.memory.leaks.leak_detector import LeakDetector, SearchScope
from lightning_memtools.memory.memory_releaser import MemoryReleaser, ReleaseThreshold, RetainedMemory
from lightning_memtools.memory.owned import OnDevice
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.stats import MemoryReader

Evaluation = Literal["val", "test", "predict"]
EVALUATIONS: tuple[Evaluation, ...] = get_args(Evaluation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOptions:
    """The arguments of EmptyCache, checked; its docstring describes each."""

    stages: Sequence[str]
    collect_garbage: bool
    min_reclaimable: float | str
    always: bool
    ledger: bool
    warn_after: int

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: One is not among those accepted.
        """
        is_list = isinstance(self.stages, Iterable) and not isinstance(self.stages, str)
        unknown = [stage for stage in self.stages if stage not in EVALUATIONS] if is_list else []
        if unknown or not is_list:
            what = f"holds {unknown[0]!r}, which is not a stage" if unknown else "is not a list of stages"
            raise ValueError(
                f"stages={self.stages!r} {what}. Accepted are {', '.join(map(repr, EVALUATIONS))}, in a list: "
                'stages=["val", "test"]. The end of fit always counts.'
            )
        if not isinstance(self.always, bool):
            raise ValueError(f"always={self.always!r} is neither True nor False.")  # noqa: TRY004, as of every bad argument
        if not is_count(self.warn_after):
            raise ValueError(
                f"warn_after={self.warn_after!r} is not a count of epochs. Give a whole number of 1 or more."
            )
        ReleaseThreshold(self.min_reclaimable)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """The access to a run that releases need.

    Attributes:
        reader: The device.
        on_device: Tells which tensors are on it.
        model: The model.
        optimizers: Returns its optimizers.
        in_fit: True if the run trains.
        predictions: Returns the predictions that the run keeps.
        find_scope: Returns where holders of leaking tensors are searched for.
        step: Returns the number of the current training step.
        counts_evaluations: Returns True if growth is counted over evaluations, and not over epochs.
        log: Logs scalars.
        say: Tells the user something, once.
        rank: The words " of rank <n>" where there are several ranks.
    """

    reader: MemoryReader
    on_device: OnDevice
    model: nn.Module
    optimizers: Callable[[], Sequence[Optimizer]]
    in_fit: bool
    predictions: Callable[[], Any]
    find_scope: Callable[[], SearchScope]
    step: Callable[[], int]
    counts_evaluations: Callable[[], bool]
    log: Callable[[Mapping[str, float]], None]
    say: Callable[[str], None]
    rank: str = ""


@dataclass(slots=True)
class EvaluationReleases:
    """Releases memory at the boundaries of a run's evaluations, and takes a reading of what stays at each.

    Attributes:
        options: The arguments of EmptyCache.
        run: The access to the run; with None nothing is done.
    """

    options: ReleaseOptions
    run: WatchedRun | None = None
    _detector: LeakDetector | None = field(default=None, init=False)
    _releaser: MemoryReleaser | None = field(default=None, init=False)
    _has_evaluated: bool = field(default=False, init=False)  # and the work at the end of it is not done yet
    _epoch_has_evaluation: bool = field(default=False, init=False)
    _releases_at_the_end: bool = field(default=False, init=False)
    _inputs: list[weakref.ref[Tensor]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Make what watches the device."""
        options, run = self.options, self.run
        if run is None:
            return
        if options.ledger and run.in_fit:
            self._detector = LeakDetector(
                run.on_device, warn_after=options.warn_after, find_scope=run.find_scope, step=run.step
            )
        self._releaser = MemoryReleaser(
            run.reader,
            run.on_device,
            threshold=ReleaseThreshold(options.min_reclaimable),
            collect_garbage=options.collect_garbage,
            always=options.always,
            leak_detector=self._detector,
        )

    def closed(self) -> EvaluationReleases:
        """Stop watching, and return an object for no run. Twice does no harm."""
        if self._detector is not None:
            self._detector.close()
        return EvaluationReleases(self.options)

    def begin(self, stage: str) -> None:
        """Release memory before an evaluation."""
        if stage in self.options.stages:
            self.release()

    def note_batch(self, batch: Any) -> None:
        """Remember a batch of an evaluation: outside of fit it is still there when the run ends."""
        if self.run is not None and not self.run.in_fit:
            self._inputs = [weakref.ref(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]

    def end(self, stage: str) -> None:
        """Note the end of an evaluation. In fit, the work waits until the last batch is dropped.

        Outside of fit, the reading is taken now, while the model is on the device; memory is released at the run's end.
        """
        if self.run is None or stage not in self.options.stages:
            return
        if self.run.in_fit:
            self._has_evaluated = self._epoch_has_evaluation = True
            return
        self._releases_at_the_end = True
        inputs = [tensor for reference in self._inputs if (tensor := reference()) is not None]
        self._collect([inputs, self.run.predictions()])

    def end_run(self) -> None:
        """Release what an evaluation outside of fit held until its end."""
        if self.run is not None and self._releases_at_the_end:
            self.release(self.run.predictions())

    def begin_training(self) -> None:
        """Take the first reading, the baseline of the others."""
        if self.run is not None and self._detector is not None:
            self._warn_of_leak(self._collect(), is_evaluation=self.run.counts_evaluations())

    def begin_training_batch(self, batch: Any) -> None:
        """End an evaluation inside the epoch, whose last batch is dropped by now."""
        if self._has_evaluated:
            self._end_evaluation(batch)

    def end_epoch(self, *, validates: bool) -> None:
        """End an evaluation at the epoch's end, and take the epoch's reading.

        Args:
            validates: True if the run validates, so that epochs without an evaluation are not comparable.
        """
        reads = self._epoch_has_evaluation or not (validates and "val" in self.options.stages)
        retained = None
        if self._has_evaluated:
            retained = self._end_evaluation()
        elif reads and self._detector is not None:
            retained = self._collect()
        if reads:
            self._warn_of_leak(retained, is_evaluation=False)
        self._epoch_has_evaluation = False

    def release(self, inputs: Any = None) -> RetainedMemory | None:
        """Collect garbage and empty the cache where that is worth it, and log both.

        Args:
            inputs: Tensors that are expected to be there.
        """
        run, releaser = self.run, self._releaser
        if run is None or releaser is None:
            return None
        # After the warning, garbage that is not worth releasing is not worth a collection either.
        exact = self.options.ledger and (self._detector is None or not self._detector.has_reported)
        released, retained = releaser.release(run.model, run.optimizers(), inputs=inputs, exact=exact)
        run.log(released.scalars() | (retained.scalars() if self.options.ledger else {}))
        run.say(releaser.cannot_empty)
        return retained

    def _end_evaluation(self, inputs: Any = None) -> RetainedMemory | None:
        self._has_evaluated = False
        retained = self.release(inputs)
        self._warn_of_leak(retained, is_evaluation=True)
        return retained

    def _collect(self, inputs: Any = None) -> RetainedMemory | None:
        run, releaser = self.run, self._releaser
        if run is None or releaser is None:
            return None
        retained = releaser.collect(run.model, run.optimizers(), inputs=inputs)
        if self.options.ledger:
            run.log(retained.scalars())
        return retained

    def _warn_of_leak(self, retained: RetainedMemory | None, *, is_evaluation: bool) -> None:
        """Give a reading to the detector, if it is of the kind that is counted, and pass on its report."""
        run, releaser = self.run, self._releaser
        if run is None or releaser is None or retained is None or run.counts_evaluations() != is_evaluation:
            return
        report = releaser.find_leak(retained)
        if report is not None:
            readings = "evaluations" if is_evaluation else "epochs"
            warnings.warn(report.text(device=f"{run.reader.name}{run.rank}", readings=readings), stacklevel=2)
