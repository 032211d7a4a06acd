"""OOMReport: what filled the device when memory ran out, and what would have helped."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_memtools.callbacks._oom_watch import Watch
from lightning_memtools.callbacks._oom_write import Reporter
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.oom.culprit import NoticeBoard
from lightning_memtools.reporting.carried_device import CarriedDevice, put_on_device
from lightning_memtools.reporting.files import report_directory


class OOMReport(Callback):
    """Explains an out-of-memory error: what filled the device, and what would have helped, with numbers that hold.

    When fit, validate, test or predict runs out of memory, a report is written to `<log_dir>/memtools/` and to loggers
    that take text (`memtools/oom_report`), a few lines of it to the console and onto the error, which then goes on. It
    holds the split of what was allocated, the modules with most activations, whether fragmentation was the cause, and
    ranked actions. Numbers stand only beside actions that were tried out: by tracing the failed step on fake tensors,
    or by replaying the recorded history of the allocator.

    On CUDA and on a VirtualDevice the facts are captured in the moment of failure, before anything unwinds. Elsewhere
    they are captured from the exception, while the frames of the failed step are still there. Out-of-memory errors
    that your code catches are not reported.

    Costs: one reading of a counter per batch. With `snapshot`, PyTorch records each allocation with its Python stack
    (2 microseconds each, the last 50,000 are kept on the host). A report takes less than 10 s and allocates nothing on
    the device; of the checks, those that are not reached in 8 s say so.

    Args:
        directory: Where reports go, instead of `<log_dir>/memtools/`.
        snapshot: Record the allocator's history, and write it beside the report as a memory snapshot for
            https://pytorch.org/memory_viz. Without, fragmentation cannot be judged.
        top: How many modules are listed.

    Raises:
        ValueError: `top` is below 1.
    """

    takes_part_in_trials = False
    """BatchSizeTuner's trials leave this callback out."""

    def __init__(self, *, directory: str | None = None, snapshot: bool = True, top: int = 10) -> None:
        if top < 1:
            raise ValueError(f"top={top} is not a number of modules. Use 1 or more.")
        self.directory = directory
        self.snapshot = snapshot
        self.top = top
        self._carried = CarriedDevice()
        self._watch: Watch | None = None
        self._reporter: Reporter | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a run left here cannot be pickled, and no other run needs it; a VirtualDevice is taken along."""
        fresh = type(self)(directory=self.directory, snapshot=self.snapshot, top=self.top)
        return vars(fresh) | {"_carried": self._carried}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to listen to the device."""
        self._stop()
        self._carried.enter()
        found = report_directory(trainer, self.directory)
        files = found if isinstance(found, Path) else None
        board = None
        if trainer.world_size > 1:
            board = NoticeBoard(files, trainer.strategy.broadcast(uuid.uuid4().hex[:12]))
        self._reporter = Reporter(files, self.top, board)
        self._watch = Watch(trainer, pl_module, snapshot=self.snapshot)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the model on a VirtualDevice."""
        put_on_device(trainer, pl_module)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The sanity check begins."""
        put_on_device(trainer, pl_module)
        self._running().begin("sanity check")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training begins."""
        put_on_device(trainer, pl_module)
        self._running().begin("train")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A batch is there."""
        self._running().begin_batch(batch, batch_idx, "forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Backward begins."""
        self._running().phase = "backward"

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Backward has ended."""
        self._running().phase = "optimizer step" if pl_module.automatic_optimization else "forward"

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The optimizer's step begins."""
        self._running().phase = "optimizer step"

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Let the batch go."""
        self._running().end_batch()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation begins."""
        if not trainer.sanity_checking:
            put_on_device(trainer, pl_module)
            self._running().begin("val")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A batch is there."""
        self._running().begin_batch(batch, batch_idx)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Let the batch go."""
        self._running().end_batch()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation within fit has ended."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._running().begin("train")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A test begins."""
        put_on_device(trainer, pl_module)
        self._running().begin("test")

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A batch is there."""
        self._running().begin_batch(batch, batch_idx)

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Let the batch go."""
        self._running().end_batch()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prediction begins."""
        put_on_device(trainer, pl_module)
        self._running().begin("predict")

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A batch is there."""
        self._running().begin_batch(batch, batch_idx)

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Let the batch go."""
        self._running().end_batch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report if memory ran out, here or on another rank."""
        watch, reporter = self._watch, self._reporter
        if watch is None or reporter is None:
            return
        # What runs out while a report is made must not take the place of what it is about.
        watch.is_reporting = True
        try:
            if is_out_of_memory(exception):
                reporter.report(trainer, pl_module, exception, watch)
            else:
                reporter.report_other_rank(trainer, exception)
        except Exception as error:  # noqa: BLE001, nothing may take the place of the original error
            where = watch.last_moment()
            exception.add_note(
                f"OOMReport: {f'memory ran out ({where}), but ' if where else ''}the report itself failed: "
                f"{type(error).__name__}: {error}"
            )
        finally:
            self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop listening."""
        self._stop()

    def _running(self) -> Watch:
        if self._watch is None:
            raise RuntimeError("OOMReport's hooks were called without its setup hook.")
        return self._watch

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = self._reporter = None
        self._carried.leave()
