"""EmptyCache: releases memory around evaluation, and names the tensors that pile up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_memtools._lightning import EitherCallback, training_step
from lightning_memtools.memory.evaluation_releases import (
    EVALUATIONS,
    Evaluation,
    EvaluationReleases,
    ReleaseOptions,
    WatchedRun,
)
from lightning_memtools.memory.leaks.leak_detector import SearchScope
from lightning_memtools.memory.owned import on_device_of
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.reporting.carried_device import CarriedDevice, put_on_device
from lightning_memtools.reporting.loggers import Charts, log_scalars, write_layout


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

    When the retained memory grows in `warn_after` epochs in a row, one warning names the tensors and what holds them.

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
        given: Any = {"stages": stages, "collect_garbage": collect_garbage, "always": always,
                      "ledger": ledger, "min_reclaimable": min_reclaimable, "warn_after": warn_after}  # fmt: skip
        self._options = ReleaseOptions(**given)
        vars(self).update(given)
        self._carried = CarriedDevice()
        self._releases = EvaluationReleases(self._options)
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_releases": EvaluationReleases(self._options)}

    def charts(self, trainer: Trainer) -> Charts:
        """Return the charts of the retained memory with its parts, and of the released memory."""
        if trainer.state.fn != TrainerFn.FITTING or reader_for(trainer.strategy.root_device) is None:
            return {}  # no curve: a chart would stay empty
        freed = {"memory released after evaluation (GiB)": ["memory/cache/freed_gib"]}
        stays = {"memory that stays after evaluation (GiB)": ["memory/retained_gib", "memory/retained/.*_gib"]}
        return {"memory": {**(stays if self._options.ledger else {}), **freed}}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the device; say so if it keeps no cache."""
        self._forget()
        self._carried.enter()
        reader = reader_for(device := trainer.strategy.root_device)
        if reader is None:
            self._say(f"EmptyCache does nothing: {device} keeps no cache of memory that could be released.")
            return
        run = WatchedRun(
            reader=reader,
            on_device=on_device_of(reader, device),
            model=pl_module,
            optimizers=lambda: trainer.optimizers,
            in_fit=stage == TrainerFn.FITTING,
            predictions=lambda: trainer.predict_loop.predictions if stage == TrainerFn.PREDICTING else None,
            # The model first, then what else belongs to the user.
            find_scope=lambda: SearchScope.around(pl_module, [*trainer.callbacks, trainer.datamodule], stop_at=trainer),  # type: ignore[attr-defined]
            step=lambda: training_step(trainer),
            counts_evaluations=lambda: _has_few_epochs(trainer, self._options.warn_after),
            log=lambda scalars: log_scalars(trainer, scalars, training_step(trainer)),
            say=self._say,
            rank=f" of rank {trainer.global_rank}" if trainer.world_size > 1 else "",
        )
        self._releases = EvaluationReleases(self._options, run)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lay out TensorBoard's custom scalars."""
        write_layout(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory after the sanity check's evaluation."""
        self._releases.begin("val")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the first reading, the baseline of the others."""
        put_on_device(trainer, pl_module)
        self._releases.begin_training()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End an evaluation inside the epoch: at on_validation_end Lightning still held its last batch."""
        self._releases.begin_training_batch(batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End an evaluation at the epoch's end, and take the epoch's reading."""
        self._releases.end_epoch(validates=bool(trainer.enable_validation))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory. Where the strategy moves the model to the host, it has done so by now."""
        self._releases.release()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory before validation or the sanity check."""
        put_on_device(trainer, pl_module)
        self._releases.begin("val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of validation; in fit the work waits until Lightning has dropped the last batch."""
        if not trainer.sanity_checking:
            self._releases.end("val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory before a test run."""
        put_on_device(trainer, pl_module)
        self._releases.begin("test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of a test run."""
        self._releases.end("test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory before a prediction run."""
        put_on_device(trainer, pl_module)
        self._releases.begin("predict")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of a prediction run."""
        self._releases.end("predict")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
                                *args: Any, **kwargs: Any) -> None:  # fmt: skip
        """Remember the batch: outside of fit it is still there when the run ends."""
        self._releases.note_batch(batch)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release what a run outside of fit held until its end, and forget everything."""
        self._releases.end_run()
        self._forget()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forget everything."""
        self._forget()

    def _say(self, message: str) -> None:
        if message and message not in self._said:
            self._said.add(message)
            rank_zero_info(message)

    def _forget(self) -> None:
        self._carried.leave()
        self._releases = self._releases.closed()


def _has_few_epochs(trainer: Trainer, warn_after: int) -> bool:
    """Return whether the run has too few epochs to count them, such as one long epoch with many evaluations."""
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        return trainer.max_epochs < warn_after
    batches = trainer.max_steps * trainer.accumulate_grad_batches
    return batches >= 0 and batches < warn_after * trainer.num_training_batches
