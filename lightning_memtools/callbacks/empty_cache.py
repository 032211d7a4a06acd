"""EmptyCache: releases memory around evaluation, and names the tensors that pile up."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_memtools._lightning import training_step
from lightning_memtools._torch import tree_leaves
from lightning_memtools.memory.leaks.leak_detector import LeakDetector, SearchScope
from lightning_memtools.memory.memory_releaser import MemoryReleaser, ReleaseThreshold, RetainedMemory
from lightning_memtools.memory.owned import on_device_of
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.reporting.carried_device import CarriedDevice, put_on_device
from lightning_memtools.reporting.loggers import Charts, log_scalars, write_layout

Evaluation = Literal["val", "test", "predict"]
_STAGES: tuple[Evaluation, ...] = get_args(Evaluation)


class EmptyCache(Callback):
    """Releases cached memory at the start and end of evaluation and at the end of fit, and watches what stays.

    PyTorch keeps the memory that it once requested, divided for the shapes of training; evaluation at other shapes may
    then not fit beside it. At each of these boundaries unreachable objects are collected, and whole free segments are
    released if they are large enough: all that is released has to be requested again.

    | logged | meaning |
    | --- | --- |
    | `memory/cache/freed_gib` | memory that the boundary released |
    | `memory/cache/ms` | time that it took |
    | `memory/retained_gib` | memory that stays allocated, without the batch that is in use (with `ledger`) |
    | `memory/retained/<category>_gib` | its parts: parameters, gradients, optimizer, other (with `ledger`) |

    When the retained memory grows in `warn_after` epochs in a row, one warning names the tensors and what holds them.

    Costs: emptying waits for the device. A full collection takes 0.1 to 0.5 s per million Python objects, so it is left
    out where all allocated memory belongs to the model and its optimizers, or was there after the last one: a healthy
    run pays for two or three at its beginning. A collection that takes over half a second (0.05 s where it could not
    free enough memory to be worth releasing) waits until its time is a small share of the time since the last one, or
    until a warning. Every rank decides for itself; none waits for another.

    Args:
        stages: The stages that count: "val" (with the sanity check), "test", "predict". The end of fit always does.
        collect_garbage: Whether unreachable objects are collected first. Without it, tensors in reference cycles stay
            until Python collects them, and the ledger may count them.
        min_reclaimable: The least memory that is worth releasing: a share of the device (of the reserved memory, where
            the capacity is not known), or a size such as "512MiB". With 0, all that can be released is.
        always: Whether garbage is collected and the cache emptied at every boundary, however long it takes and however
            little it brings, as with a call of `torch.cuda.empty_cache()` there. `min_reclaimable` then has no effect.
        ledger: Whether to log the retained memory and to warn of growth.
        warn_after: The number of epochs of growth in a row before the warning. Where the run has fewer epochs,
            evaluations are counted instead.

    Raises:
        ValueError: A stage is unknown, `min_reclaimable` is out of range, `always` is not a bool, or
            `warn_after` is below 1.
    """

    def __init__(
        self,
        *,
        stages: Sequence[Evaluation] = _STAGES,
        collect_garbage: bool = True,
        min_reclaimable: float | str = 0.05,
        always: bool = False,
        ledger: bool = True,
        warn_after: int = 3,
    ) -> None:
        self.stages = _checked_stages(stages)
        self.collect_garbage = collect_garbage
        self.min_reclaimable = min_reclaimable
        self.ledger = ledger
        self.warn_after = _checked_count(warn_after)
        self.always = _checked_switch(always)
        ReleaseThreshold(min_reclaimable)
        self._carried = CarriedDevice()
        self._releaser: MemoryReleaser | None = None
        self._said: set[str] = set()
        self._has_evaluated = False  # and the work at the end of it is not done yet
        self._epoch_has_evaluation = False
        self._releases_at_teardown = False
        self._inputs: list[weakref.ref[Tensor]] = []

    def charts(self, trainer: Trainer) -> Charts:
        """Return the charts of the retained memory with its parts, and of the released memory."""
        if self._releaser is None or trainer.state.fn != TrainerFn.FITTING:
            return {}  # no curve: a chart would stay empty
        stays = (
            {"memory that stays after evaluation (GiB)": ["memory/retained_gib", "memory/retained/.*_gib"]}
            if self.ledger
            else {}
        )
        return {"memory": {**stays, "memory released after evaluation (GiB)": ["memory/cache/freed_gib"]}}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the device; say so if it keeps no cache."""
        self._forget()
        self._carried.enter()
        device = trainer.strategy.root_device
        reader = reader_for(device)
        if reader is None:
            self._say(f"EmptyCache does nothing: {device} keeps no cache of memory that could be released.")
            return
        on_device = on_device_of(reader, device)
        detector = None
        if self.ledger and stage == TrainerFn.FITTING:
            detector = LeakDetector(on_device, warn_after=self.warn_after, find_scope=lambda: _search_scope(trainer))
        self._releaser = MemoryReleaser(
            reader,
            on_device,
            threshold=ReleaseThreshold(self.min_reclaimable),
            collect_garbage=self.collect_garbage,
            always=self.always,
            leak_detector=detector,
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lay out TensorBoard's custom scalars."""
        write_layout(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory after the sanity check's evaluation."""
        if "val" in self.stages:
            self._release(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the first reading, the baseline of the others."""
        put_on_device(trainer, pl_module)
        if self._watches_leaks:
            self._warn_of_leak(trainer, self._collect(trainer, pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End an evaluation inside the epoch: at on_validation_end Lightning still held its last batch."""
        if self._has_evaluated:
            self._end_evaluation_in_fit(trainer, pl_module, inputs=batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End an evaluation at the epoch's end, and take the epoch's reading."""
        reads = self._epoch_has_evaluation or not (trainer.enable_validation and "val" in self.stages)
        retained = None
        if self._has_evaluated:
            retained = self._end_evaluation_in_fit(trainer, pl_module)
        elif reads and self._watches_leaks:
            retained = self._collect(trainer, pl_module)
        if retained is not None and reads and not self._counts_evaluations(trainer):
            self._warn_of_leak(trainer, retained)
        self._epoch_has_evaluation = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory. Where the strategy moves the model to the host, it has done so by now."""
        self._release(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory before validation or the sanity check."""
        self._begin_evaluation(trainer, pl_module, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of validation; in fit the work waits until Lightning has dropped the last batch."""
        self._end_evaluation(trainer, pl_module, "val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory before a test run."""
        self._begin_evaluation(trainer, pl_module, "test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of a test run."""
        self._end_evaluation(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory before a prediction run."""
        self._begin_evaluation(trainer, pl_module, "predict")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of a prediction run."""
        self._end_evaluation(trainer, pl_module, "predict")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
                                *args: Any, **kwargs: Any) -> None:  # fmt: skip
        """Remember the batch: outside of fit it is still there when the run ends."""
        if self._releaser is not None and trainer.state.fn != TrainerFn.FITTING:
            self._inputs = [weakref.ref(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release what a run outside of fit held until its end, and forget everything."""
        if self._releases_at_teardown:
            self._release(trainer, pl_module, inputs=_predictions(trainer))
        self._forget()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forget everything."""
        self._forget()

    def _begin_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        put_on_device(trainer, pl_module)
        if stage in self.stages:
            self._release(trainer, pl_module)

    def _end_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._releaser is None or stage not in self.stages or trainer.sanity_checking:
            return
        if trainer.state.fn == TrainerFn.FITTING:
            self._has_evaluated = self._epoch_has_evaluation = True
            return
        # Lightning holds the last batch until teardown. The reading is taken now, while the model is on the device.
        self._releases_at_teardown = True
        inputs = [tensor for reference in self._inputs if (tensor := reference()) is not None]
        self._collect(trainer, pl_module, inputs=[inputs, _predictions(trainer)])

    def _end_evaluation_in_fit(
        self, trainer: Trainer, pl_module: LightningModule, inputs: Any = None
    ) -> RetainedMemory | None:
        self._has_evaluated = False
        retained = self._release(trainer, pl_module, inputs=inputs)
        if retained is not None and self._counts_evaluations(trainer):
            self._warn_of_leak(trainer, retained)
        return retained

    def _release(self, trainer: Trainer, pl_module: LightningModule, inputs: Any = None) -> RetainedMemory | None:
        if self._releaser is None:
            return None
        # After the warning, garbage that is not worth releasing is not worth a collection either.
        detector = self._releaser.leak_detector
        exact = self.ledger and (detector is None or not detector.has_reported)
        released, retained = self._releaser.release(pl_module, trainer.optimizers, inputs=inputs, exact=exact)
        scalars = released.scalars() | (retained.scalars() if self.ledger else {})
        log_scalars(trainer, scalars, training_step(trainer))
        self._say(self._releaser.cannot_empty)
        return retained

    def _collect(self, trainer: Trainer, pl_module: LightningModule, inputs: Any = None) -> RetainedMemory:
        assert self._releaser is not None
        retained = self._releaser.collect(pl_module, trainer.optimizers, inputs=inputs)
        if self.ledger:
            log_scalars(trainer, retained.scalars(), training_step(trainer))
        return retained

    @property
    def _watches_leaks(self) -> bool:
        return self._releaser is not None and self._releaser.leak_detector is not None

    def _warn_of_leak(self, trainer: Trainer, retained: RetainedMemory) -> None:
        report = None if self._releaser is None else self._releaser.find_leak(retained)
        if self._releaser is not None and report is not None:
            rank = f" of rank {trainer.global_rank}" if trainer.world_size > 1 else ""
            readings = "evaluations" if self._counts_evaluations(trainer) else "epochs"
            warnings.warn(report.text(device=f"{self._releaser.reader.name}{rank}", readings=readings), stacklevel=2)

    def _counts_evaluations(self, trainer: Trainer) -> bool:
        """Return whether the run has too few epochs to count them, such as one long epoch with many evaluations."""
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            return trainer.max_epochs < self.warn_after
        batches = trainer.max_steps * trainer.accumulate_grad_batches
        return batches >= 0 and batches < self.warn_after * trainer.num_training_batches

    def _say(self, message: str) -> None:
        if message and message not in self._said:
            self._said.add(message)
            rank_zero_info(message)

    def _forget(self) -> None:
        self._carried.leave()
        self._releaser = None
        self._has_evaluated = self._epoch_has_evaluation = self._releases_at_teardown = False
        self._inputs = []


def _predictions(trainer: Trainer) -> Any:
    return trainer.predict_loop.predictions if trainer.state.fn == TrainerFn.PREDICTING else None


def _search_scope(trainer: Trainer) -> SearchScope:
    """Return where holders are searched for: the model first, then what else belongs to the user."""
    others = [*trainer.callbacks, trainer.datamodule]  # type: ignore[attr-defined]
    return SearchScope.around(trainer.lightning_module, others, stop_at=trainer)


def _checked_stages(stages: Sequence[str]) -> tuple[str, ...]:
    is_list = isinstance(stages, Iterable) and not isinstance(stages, str)
    unknown = [stage for stage in stages if stage not in _STAGES] if is_list else []
    if unknown or not is_list:
        what = f"holds {unknown[0]!r}, which is no stage" if unknown else "is not a list of stages"
        raise ValueError(
            f"stages={stages!r} {what}. Accepted are {', '.join(map(repr, _STAGES))}, in a list: "
            'stages=["val", "test"]. The end of fit always counts.'
        )
    return tuple(stages)


def _checked_switch(always: bool) -> bool:
    if not isinstance(always, bool):
        raise ValueError(f"always={always!r} is neither True nor False.")  # noqa: TRY004, as of every bad argument
    return always


def _checked_count(warn_after: int) -> int:
    if not isinstance(warn_after, int) or isinstance(warn_after, bool) or warn_after < 1:
        raise ValueError(f"warn_after={warn_after!r} is not a count of epochs. Give a whole number of 1 or more.")
    return warn_after
