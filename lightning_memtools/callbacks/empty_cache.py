"""EmptyCache: releases memory around evaluation, and names the tensors that pile up."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_memtools._lightning import EitherCallback, callbacks_of, running_stage, training_step
from lightning_memtools._torch import tree_leaves
from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.memory.leaks.growth_watch import EVERY, GrowthWatch, room_of
from lightning_memtools.memory.leaks.holdings import find_holdings
from lightning_memtools.memory.leaks.leak_detector import LeakDetector, SearchScope
from lightning_memtools.memory.memory_releaser import MemoryReleaser, ReleaseThreshold, RetainedMemory
from lightning_memtools.memory.owned import bytes_on_device, on_device_of
from lightning_memtools.memory.readers import allocated_bytes, reader_for
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.reporting.carried_device import CarriedDevice, put_on_device
from lightning_memtools.reporting.files import NotWritten, report_directory, write_report_or_warn
from lightning_memtools.reporting.held_words import growth_warning
from lightning_memtools.reporting.loggers import Charts, log_scalars, log_text, write_layout

Evaluation = Literal["val", "test", "predict"]
EVALUATIONS: tuple[Evaluation, ...] = get_args(Evaluation)


@dataclass(slots=True)
class _ReleasingRun:
    """The state of one run of the Trainer."""

    releaser: MemoryReleaser
    in_fit: bool
    directory: Path | NotWritten
    has_evaluated: bool = False  # and the work at the end of the evaluation is not done yet
    epoch_has_evaluation: bool = False
    releases_at_the_end: bool = False
    inputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    growth: GrowthWatch | None = None
    n_batches: int = 0


class EmptyCache(EitherCallback):
    """Releases cached memory at the start and end of evaluation and at the end of fit, and watches what stays.

    PyTorch keeps the memory that it has once requested, cut for the shapes of training. Evaluation at other shapes may
    then not fit beside it. At each of these boundaries unreachable objects are collected, and segments that are wholly
    free are released, if they are large enough: what is released has to be requested again.

    | logged | meaning |
    | --- | --- |
    | `memory/cache/freed_gib` | memory that the boundary released |
    | `memory/cache/ms` | time that it took |
    | `memory/retained_gib` | memory that stays allocated, without the batch that is in use (with `ledger`) |
    | `memory/retained/<category>_gib` | its parts: parameters, gradients, optimizer, other (with `ledger`) |
    | `memory/leaks` | the number of leaks that a warning names, at its step (with `ledger`) |
    | `memtools/leak` (text), `<log_dir>/memtools/leak.md` | the warning (with `ledger`) |

    When the retained memory grows in `warn_after` epochs in a row, one warning names the tensors and what holds them.
    If they would fit until the run ends, it is given after twelve epochs or in the last one: a cache may be filling.
    Memory that rises steadily from batch to batch within an epoch is noticed after 300 batches: if it would fill the
    device before the epoch ends (or the run, where it went on over the end of an epoch), a warning names its holder
    and the batch at which the device is full.

    Costs: emptying waits for the device. A full collection takes 0.1 to 0.5 s per million Python objects, so it is left
    out where all allocated memory belongs to the model and its optimizers, or was there after the last one: a healthy
    run pays for two or three at its beginning. A collection that takes over half a second (0.05 s where it could not
    free enough memory to be worth releasing) waits until its time is a small share of the time since the last one, or
    until a warning is due. Every rank decides for itself; none waits for another.

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
        ValueError: An argument is not among those accepted.
    """

    parts_of_a_run = ("_run",)

    def __init__(
        self,
        *,
        stages: Sequence[Evaluation] = EVALUATIONS,
        collect_garbage: bool = True,
        min_reclaimable: float | str = 0.05,
        always: bool = False,
        ledger: bool = True,
        warn_after: int = 3,
    ) -> None:
        is_list = isinstance(stages, Iterable) and not isinstance(stages, str)
        unknown = [stage for stage in stages if stage not in EVALUATIONS] if is_list else []
        if unknown or not is_list:
            what = f"holds {unknown[0]!r}, which is not a stage" if unknown else "is not a list of stages"
            raise ValueError(
                f"stages={stages!r} {what}. Accepted are {', '.join(map(repr, EVALUATIONS))}, in a list: "
                'stages=["val", "test"]. The end of fit always counts.'
            )
        if not isinstance(always, bool):
            raise TypeError(f"always must be True or False, got {always!r}.")
        if not is_count(warn_after):
            raise ValueError(f"warn_after={warn_after!r} is not a count of epochs. Give a whole number of 1 or more.")
        ReleaseThreshold(min_reclaimable)  # raises for what is none
        self.stages = stages
        self.collect_garbage = collect_garbage
        self.min_reclaimable = min_reclaimable
        self.always = always
        self.ledger = ledger
        self.warn_after = warn_after
        self._carried = CarriedDevice()
        self._is_new = FirstTime()
        self._run: _ReleasingRun | None = None

    def charts(self, trainer: Trainer) -> Charts:
        """Return the charts of the retained memory with its parts, and of the released memory."""
        if trainer.state.fn != TrainerFn.FITTING or reader_for(trainer.strategy.root_device) is None:
            return {}  # no curve: a chart would stay empty
        freed = {"memory released after evaluation (GiB)": ["memory/cache/freed_gib"]}
        stays = {"memory that stays after evaluation (GiB)": ["memory/retained_gib", "memory/retained/.*_gib"]}
        return {"memory": {**(stays if self.ledger else {}), **freed}}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the device; say so if it keeps no cache."""
        self._forget()
        self._carried.enter()
        reader = reader_for(device := trainer.strategy.root_device)
        if reader is None:
            self._say(f"EmptyCache does nothing: {device} keeps no cache of memory that could be released.")
            return
        on_device, in_fit = on_device_of(reader, device), stage == TrainerFn.FITTING
        detector, datamodule = None, getattr(trainer, "datamodule", None)
        if self.ledger and in_fit:
            detector = LeakDetector(
                on_device,
                warn_after=self.warn_after,
                # The model first, then what else belongs to the user.
                find_scope=lambda: SearchScope.around(pl_module, [*callbacks_of(trainer), datamodule], stop_at=trainer),
                may_wait=lambda per_epoch: self._may_wait(trainer, reader, per_epoch),
            )
        releaser = MemoryReleaser(
            reader,
            on_device,
            threshold=ReleaseThreshold(self.min_reclaimable),
            collect_garbage=self.collect_garbage,
            always=self.always,
            leak_detector=detector,
        )
        growth = GrowthWatch() if self.ledger and in_fit else None
        self._run = _ReleasingRun(releaser, in_fit, report_directory(trainer), growth=growth)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lay out TensorBoard's custom scalars."""
        write_layout(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory after the sanity check's evaluation."""
        if "val" in self.stages:
            self._release(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the first reading, the baseline of the others."""
        put_on_device(trainer, pl_module)
        if self._run is not None and self.ledger:
            self._warn_of_leak(trainer, self._collect(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End an evaluation inside the epoch: at on_validation_end Lightning still held its last batch."""
        run = self._run
        if run is None:
            return
        if run.has_evaluated:
            self._end_evaluation(trainer, batch)
        run.n_batches += 1
        if run.growth is not None and run.n_batches % EVERY == 0:
            self._watch_growth(run, run.growth, trainer, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End an evaluation at the epoch's end, and take the epoch's reading."""
        run = self._run
        if run is None:
            return
        # Where the run validates, epochs without a validation are not comparable.
        reads = run.epoch_has_evaluation or not (trainer.enable_validation and "val" in self.stages)
        retained = None
        if run.has_evaluated:
            retained = self._end_evaluation(trainer)
        elif reads and self.ledger:
            retained = self._collect(trainer)
        if reads and not self._counts_evaluations(trainer):
            self._warn_of_leak(trainer, retained)
        run.epoch_has_evaluation = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory. Where the strategy moves the model to the host, it has done so by now."""
        self._release(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory before an evaluation or the sanity check."""
        put_on_device(trainer, pl_module)
        if running_stage(trainer) in self.stages:
            self._release(trainer)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
                                *args: Any, **kwargs: Any) -> None:  # fmt: skip
        """Remember the batch: outside of fit it is still there when the run ends."""
        if self._run is not None and not self._run.in_fit:
            self._run.inputs = [weakref.ref(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of an evaluation. In fit, the work waits until Lightning has dropped the last batch.

        Outside of fit, the reading is taken now, while the model is on the device; memory is released at the run's end.
        """
        run = self._run
        if run is None or trainer.sanity_checking or running_stage(trainer) not in self.stages:
            return
        if run.in_fit:
            run.has_evaluated = run.epoch_has_evaluation = True
            return
        run.releases_at_the_end = True
        inputs = [tensor for reference in run.inputs if (tensor := reference()) is not None]
        self._collect(trainer, [inputs, _predictions(trainer)])

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release what a run outside of fit held until its end, and forget everything."""
        if self._run is not None and self._run.releases_at_the_end:
            self._release(trainer, _predictions(trainer))
        self._forget()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forget everything."""
        self._forget()

    def _watch_growth(
        self, run: _ReleasingRun, watch: GrowthWatch, trainer: Trainer, batch: Any, batch_idx: int
    ) -> None:
        """Warn once of memory that rises so steadily that it fills the device before it can stop by itself."""
        releaser, module = run.releaser, trainer.lightning_module
        inputs = bytes_on_device(tree_leaves(batch), releaser.on_device, set())
        if not watch.read(allocated_bytes(releaser.reader) - inputs, run.n_batches, trainer.current_epoch):
            return
        growth = watch.growth(releaser.reader.stats())
        # What an epoch collects is dropped at its end; growth that went on over one goes on.
        left = trainer.num_training_batches - batch_idx
        if trainer.max_epochs is not None and growth.has_lasted:
            left += (max(trainer.max_epochs, 0) - trainer.current_epoch - 1) * trainer.num_training_batches
        if growth.n_left is None or growth.n_left >= left:
            return
        run.growth = None  # said once
        scope = SearchScope.around(module, [*callbacks_of(trainer), getattr(trainer, "datamodule", None)], trainer)
        held = find_holdings(releaser.on_device, module, trainer.optimizers, batch, scope)
        found = [one for one in held.found if one.piles_up and 10 * one.n_bytes >= growth.n_bytes]
        text = growth_warning(growth, found, device=_name_of_device(trainer, releaser.reader), batch=run.n_batches)
        self._tell_leak(trainer, text, max(1, len(found)))

    def _end_evaluation(self, trainer: Trainer, inputs: Any = None) -> RetainedMemory | None:
        """Release memory after an evaluation in fit, and count its reading if evaluations are counted."""
        assert self._run is not None
        self._run.has_evaluated = False
        retained = self._release(trainer, inputs)
        if self._counts_evaluations(trainer):
            self._warn_of_leak(trainer, retained)
        return retained

    def _release(self, trainer: Trainer, inputs: Any = None) -> RetainedMemory | None:
        """Collect garbage and empty the cache where that is worth it, and log both. `inputs` are expected to stay."""
        if self._run is None:
            return None
        releaser = self._run.releaser
        # After the warning, garbage that is not worth releasing is not worth a collection either.
        exact = self.ledger and (releaser.leak_detector is None or not releaser.leak_detector.has_reported)
        released, retained = releaser.release(trainer.lightning_module, trainer.optimizers, inputs=inputs, exact=exact)
        self._log(trainer, released.scalars() | (retained.scalars() if self.ledger else {}))
        self._say(releaser.cannot_empty)
        return retained

    def _collect(self, trainer: Trainer, inputs: Any = None) -> RetainedMemory:
        """Collect garbage where that is worth it, and log what stays."""
        assert self._run is not None
        retained = self._run.releaser.collect(trainer.lightning_module, trainer.optimizers, inputs=inputs)
        if self.ledger:
            self._log(trainer, retained.scalars())
        return retained

    def _log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        log_scalars(trainer, scalars, training_step(trainer))

    def _warn_of_leak(self, trainer: Trainer, retained: RetainedMemory | None) -> None:
        """Give a reading to the detector, and pass on its report."""
        if self._run is None or retained is None:
            return
        report = self._run.releaser.find_leak(retained)
        if report is not None:
            readings = "evaluations" if self._counts_evaluations(trainer) else "epochs"
            device = _name_of_device(trainer, self._run.releaser.reader)
            text = report.text(device=device, readings=readings)
            self._tell_leak(trainer, text, len(report.findings))

    def _tell_leak(self, trainer: Trainer, text: str, n_leaks: int) -> None:
        warnings.warn(text, stacklevel=2)
        self._log(trainer, {"memory/leaks": float(n_leaks)})
        log_text(trainer, "memtools/leak", text, training_step(trainer))
        if self._run is not None and trainer.is_global_zero:
            write_report_or_warn(self._run.directory, "leak.md", text)

    def _may_wait(self, trainer: Trainer, reader: MemoryReader, bytes_per_epoch: float) -> bool:
        """Return whether memory that grows so much in each epoch fits until the run ends, and this is not its end."""
        if trainer.max_epochs is None or trainer.max_epochs < 0 or self._counts_evaluations(trainer):
            return False
        n_left = trainer.max_epochs - trainer.current_epoch - 1
        room = room_of(reader.stats())
        return n_left > 0 and not trainer.should_stop and room is not None and n_left * bytes_per_epoch < room

    def _counts_evaluations(self, trainer: Trainer) -> bool:
        """Return True if the run has too few epochs to count them, such as one long epoch with many evaluations."""
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            return trainer.max_epochs < self.warn_after
        batches = trainer.max_steps * trainer.accumulate_grad_batches
        return batches >= 0 and batches < self.warn_after * trainer.num_training_batches

    def _say(self, message: str) -> None:
        if message and self._is_new(message):
            rank_zero_info(message)

    def _forget(self) -> None:
        self._carried.leave()
        self._run = None


def _name_of_device(trainer: Trainer, reader: MemoryReader) -> str:
    return f"{reader.name} of rank {trainer.global_rank}" if trainer.world_size > 1 else reader.name


def _predictions(trainer: Trainer) -> Any:
    return trainer.predict_loop.predictions if trainer.state.fn == TrainerFn.PREDICTING else None
