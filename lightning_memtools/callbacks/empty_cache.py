"""EmptyCache: gives memory back at evaluation boundaries, and names what stays."""

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
from lightning_memtools.callbacks._virtual import CarriedDevice, put_on_device
from lightning_memtools.memory.boundaries import Boundaries, Retained
from lightning_memtools.memory.leaks.ledger import Ledger, Surroundings
from lightning_memtools.memory.leaks.referrers import names_of_modules
from lightning_memtools.memory.leaks.wording import warning_text
from lightning_memtools.memory.owned import on_device_of
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.reclaim import WorthReclaiming
from lightning_memtools.reporting.charts import Charts, write_layout
from lightning_memtools.reporting.loggers import log_scalars

Evaluation = Literal["val", "test", "predict"]
_STAGES: tuple[Evaluation, ...] = get_args(Evaluation)


class EmptyCache(Callback):
    """Gives cached memory back at the start and end of evaluation and at the end of fit, and watches what stays.

    PyTorch keeps the memory it once asked for, cut to the shapes of training; evaluation at other shapes may then not
    fit beside it. At each boundary unreachable objects are collected, and whole free segments go back to the device if
    they are worth it: whatever is given back has to be asked for again.

    Logs `memory/cache/freed_gib`, `memory/cache/ms` and, with the ledger, `memory/retained_gib` and its parts. When
    what stays grows in `warn_after` epochs in a row, one warning names the tensors and who holds them.

    Costs: emptying waits for the device. A full collection takes 0.1 to 0.5 s per million Python objects, so it is left
    out where everything that is allocated belongs to the model and its optimizers, or was there after the last one: a
    healthy run pays for two or three at its beginning. One that takes over half a second (0.05 s where it could not
    free what is worth giving back) waits until it is little of the time since the last, or until a warning. Every rank
    decides for itself; none waits for another.

    Args:
        stages: Whose boundaries count: "val" (the sanity check included), "test", "predict". The end of fit always
            does.
        collect_garbage: Whether unreachable objects are collected first. Without it, tensors in reference cycles stay
            until Python collects them, and the ledger may count them.
        min_reclaimable: The least that is worth giving back: a share of the device (of what is reserved, where its
            capacity is not known), or a size such as "512MiB".
        ledger: Whether to log what stays and to warn of growth.
        warn_after: After how many epochs of growth in a row. Evaluations are counted in place of epochs where the run
            has fewer epochs than this.

    Raises:
        ValueError: A stage is unknown, `min_reclaimable` is out of range, or `warn_after` is below 1.
    """

    def __init__(
        self,
        *,
        stages: Sequence[Evaluation] = _STAGES,
        collect_garbage: bool = True,
        min_reclaimable: float | str = 0.05,
        ledger: bool = True,
        warn_after: int = 3,
    ) -> None:
        self.stages = _checked_stages(stages)
        self.collect_garbage = collect_garbage
        self.min_reclaimable = min_reclaimable
        self.ledger = ledger
        self.warn_after = _checked_count(warn_after)
        WorthReclaiming(min_reclaimable)
        self._carried = CarriedDevice()
        self._boundaries: Boundaries | None = None
        self._ledger: Ledger | None = None
        self._said: set[str] = set()
        self._has_evaluated = False  # and the work that belongs to the end of it is not yet done
        self._epoch_has_evaluation = False
        self._gives_back_at_teardown = False
        self._inputs: list[weakref.ref[Tensor]] = []

    def charts(self, trainer: Trainer) -> Charts:
        """What stays, with its parts, and what is given back."""
        stays = {"what stays at boundaries": ["memory/retained_gib", "memory/retained/.*_gib"]} if self.ledger else {}
        return {"memory": {**stays, "given back at boundaries": ["memory/cache/freed_gib"]}}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the device; say so if it keeps no cache."""
        self._forget()
        self._carried.enter()
        device = trainer.strategy.root_device
        reader = reader_for(device)
        if reader is None:
            self._say(f"EmptyCache does nothing: {device} keeps no cache of memory that could be given back.")
            return
        on_device = on_device_of(reader, device)
        self._boundaries = Boundaries(
            reader,
            on_device,
            worth_reclaiming=WorthReclaiming(self.min_reclaimable),
            collect_garbage=self.collect_garbage,
        )
        if self.ledger and stage == TrainerFn.FITTING:
            self._ledger = Ledger(
                on_device,
                warn_after=self.warn_after,
                find_surroundings=lambda: _surroundings(trainer),
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lay out TensorBoard's custom scalars."""
        write_layout(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End of the sanity check's evaluation."""
        if "val" in self.stages:
            self._give_back(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The ledger's first reading, which the others are compared with."""
        put_on_device(trainer, pl_module)
        if self._boundaries is not None and self._ledger is not None:
            self._read(trainer, self._collect(trainer, pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End of an evaluation inside the epoch: at on_validation_end Lightning still held its last batch."""
        if self._has_evaluated:
            self._end_evaluation_in_fit(trainer, pl_module, inputs=batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End of an evaluation at the epoch's end, and the epoch's reading."""
        reads = self._epoch_has_evaluation or not (trainer.enable_validation and "val" in self.stages)
        retained = None
        if self._has_evaluated:
            retained = self._end_evaluation_in_fit(trainer, pl_module)
        elif reads and self._ledger is not None:
            retained = self._collect(trainer, pl_module)
        if retained is not None and reads and not self._counts_evaluations(trainer):
            self._read(trainer, retained)
        self._epoch_has_evaluation = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End of fit. Where the strategy moves the model to the host, it has done so by now."""
        self._give_back(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start of validation or of the sanity check."""
        self._begin_evaluation(trainer, pl_module, "val")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
                                *args: Any, **kwargs: Any) -> None:  # fmt: skip
        """Remember the batch: it is still there when the run ends."""
        self._note_inputs(trainer, batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End of validation; in fit the work waits for Lightning to let go of the last batch."""
        self._end_evaluation(trainer, pl_module, "val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start of a test run."""
        self._begin_evaluation(trainer, pl_module, "test")

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
                          *args: Any, **kwargs: Any) -> None:  # fmt: skip
        """Remember the batch."""
        self._note_inputs(trainer, batch)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End of a test run."""
        self._end_evaluation(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start of a prediction run."""
        self._begin_evaluation(trainer, pl_module, "predict")

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
                             *args: Any, **kwargs: Any) -> None:  # fmt: skip
        """Remember the batch."""
        self._note_inputs(trainer, batch)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End of a prediction run."""
        self._end_evaluation(trainer, pl_module, "predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give back what a run outside of fit held to its end, and let go of everything."""
        if self._gives_back_at_teardown:
            self._give_back(trainer, pl_module, inputs=_predictions(trainer))
        self._forget()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of everything."""
        self._forget()

    def _begin_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        put_on_device(trainer, pl_module)
        if stage in self.stages:
            self._give_back(trainer, pl_module)

    def _end_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._boundaries is None or stage not in self.stages or trainer.sanity_checking:
            return
        if trainer.state.fn == TrainerFn.FITTING:
            self._has_evaluated = self._epoch_has_evaluation = True
            return
        # Lightning holds the last batch until teardown. The reading is taken now, while the model is on the device.
        self._gives_back_at_teardown = True
        inputs = [tensor for reference in self._inputs if (tensor := reference()) is not None]
        self._collect(trainer, pl_module, inputs=[inputs, _predictions(trainer)])

    def _end_evaluation_in_fit(
        self, trainer: Trainer, pl_module: LightningModule, inputs: Any = None
    ) -> Retained | None:
        self._has_evaluated = False
        retained = self._give_back(trainer, pl_module, inputs=inputs)
        if retained is not None and self._counts_evaluations(trainer):
            self._read(trainer, retained)
        return retained

    def _give_back(self, trainer: Trainer, pl_module: LightningModule, inputs: Any = None) -> Retained | None:
        if self._boundaries is None:
            return None
        # Once there is nothing more to warn of, garbage that is not worth giving back is not worth a collection either.
        exact = self.ledger and (self._ledger is None or not self._ledger.has_accused)
        given_back, retained = self._boundaries.give_back(pl_module, trainer.optimizers, inputs=inputs, exact=exact)
        scalars = given_back.scalars() | (retained.scalars() if self.ledger else {})
        log_scalars(trainer, scalars, training_step(trainer))
        self._say(self._boundaries.cannot_empty)
        return retained

    def _collect(self, trainer: Trainer, pl_module: LightningModule, inputs: Any = None) -> Retained:
        assert self._boundaries is not None
        retained = self._boundaries.collect(pl_module, trainer.optimizers, inputs=inputs)
        if self.ledger:
            log_scalars(trainer, retained.scalars(), training_step(trainer))
        return retained

    def _read(self, trainer: Trainer, retained: Retained) -> None:
        if self._ledger is None or self._boundaries is None:
            return
        boundaries, owned = self._boundaries, retained.owned
        accusation = self._ledger.read(
            retained.unaccounted, owned, collect=lambda: boundaries.collect_now(owned).unaccounted
        )
        if accusation is not None:
            rank = f" of rank {trainer.global_rank}" if trainer.world_size > 1 else ""
            unit = "evaluations" if self._counts_evaluations(trainer) else "epochs"
            text = warning_text(accusation, device=f"{self._boundaries.reader.name}{rank}", readings=unit)
            warnings.warn(text, stacklevel=2)

    def _counts_evaluations(self, trainer: Trainer) -> bool:
        """Whether the run is too short for epochs to be counted: one long epoch with many evaluations, say."""
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            return trainer.max_epochs < self.warn_after
        batches = trainer.max_steps * trainer.accumulate_grad_batches
        return batches >= 0 and batches < self.warn_after * trainer.num_training_batches

    def _note_inputs(self, trainer: Trainer, batch: Any) -> None:
        if self._boundaries is not None and trainer.state.fn != TrainerFn.FITTING:
            self._inputs = [weakref.ref(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]

    def _say(self, message: str) -> None:
        if message and message not in self._said:
            self._said.add(message)
            rank_zero_info(message)

    def _forget(self) -> None:
        self._carried.leave()
        self._boundaries = None
        self._ledger = None
        self._has_evaluated = self._epoch_has_evaluation = self._gives_back_at_teardown = False
        self._inputs = []


def _predictions(trainer: Trainer) -> Any:
    return trainer.predict_loop.predictions if trainer.state.fn == TrainerFn.PREDICTING else None


def _surroundings(trainer: Trainer) -> Surroundings:
    """Where the ledger looks for holders: the model first, then what else belongs to the user."""
    model = trainer.lightning_module
    others: list[Any] = [*trainer.callbacks, trainer.datamodule]  # type: ignore[attr-defined]
    names = {id(other): type(other).__name__ for other in (*others, trainer) if other is not None}
    return Surroundings([model, *others], names | names_of_modules(model), [trainer])


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


def _checked_count(warn_after: int) -> int:
    if not isinstance(warn_after, int) or isinstance(warn_after, bool) or warn_after < 1:
        raise ValueError(f"warn_after={warn_after!r} is not a count of epochs. Give a whole number of 1 or more.")
    return warn_after
