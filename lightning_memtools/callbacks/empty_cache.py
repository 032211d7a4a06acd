"""EmptyCache: releases memory around evaluation, and names the tensors that pile up."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import callbacks_of, training_step
from lightning_memtools.callbacks.guarded import WatchingCallback
from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.memory.leaks.holder_search import names_of_run, names_of_variables
from lightning_memtools.memory.leaks.leak_detector import LeakDetector
from lightning_memtools.memory.memory_releaser import MemoryReleaser, RetainedMemory
from lightning_memtools.memory.owned import on_device_of
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.virtual import put_on_device
from lightning_memtools.reporting.files import NO_RUN, NotWritten, report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.warning_categories import FindingWarning


class EmptyCache(WatchingCallback):
    """Releases cached GPU memory around evaluation and at the end of fit, and warns of tensors that accumulate.

    PyTorch keeps freed memory in a cache, in blocks sized for training. Evaluation with other shapes may be unable
    to reuse these blocks, and may run out of memory. So garbage is collected, and cached segments without live tensors
    are released if they are large enough. Small ones are kept, because requesting memory again takes time.

    docs/empty-cache.md lists the logged tags.

    If the memory that stays allocated grows in `warn_after` epochs in a row, a warning names its tensors and holders.

    Costs: emptying waits for the device. A full collection takes 0.1 to 0.5 s per million Python objects, so it is
    skipped unless memory outside the model and its optimizers has grown since the last collection. A healthy run
    collects two or three times, at its start. Slow collections (over 0.5 s, or over 0.05 s if they released little) are
    postponed until they are rare enough to cost little, or until a warning is due. Ranks decide independently; none
    waits for another.

    Args:
        min_reclaimable: The least memory that is worth releasing, as a fraction of the device (of reserved memory, if
            the capacity is not known). With 0, everything releasable is released.
        warn_after: The number of epochs of growth in a row before the warning. If the run has fewer epochs,
            evaluations are counted instead.

    Raises:
        ValueError: An argument is out of its range.
    """

    page = "empty-cache"
    documented = (torch.OutOfMemoryError,)  # a model may not fit on the VirtualDevice that it is put on
    parts_of_a_run = ("_releaser",)

    def __init__(self, *, min_reclaimable: float = 0.05, warn_after: int = 3) -> None:
        if not is_count(warn_after):
            raise ValueError(f"warn_after={warn_after!r} is not a count of epochs. Give a whole number of 1 or more.")
        if not isinstance(min_reclaimable, int | float) or not 0 <= min_reclaimable <= 1:
            raise ValueError(
                f"min_reclaimable={min_reclaimable!r} is no share of the device. Give a number from 0 to 1."
            )
        self.min_reclaimable = min_reclaimable
        self.warn_after = warn_after
        self._is_new = FirstTime()
        self._releaser: MemoryReleaser | None = None
        self._directory: Path | NotWritten = NO_RUN
        self._has_evaluated = False  # and the work at the end of the evaluation is not done yet

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the device whose cache is to be emptied; log a message if it has no cache."""
        self.stop_watching()
        reader = reader_for(device := trainer.strategy.root_device)
        if reader is None:
            self._say(trainer, f"EmptyCache does nothing: {device} keeps no cache of memory that could be released.")
            return
        on_device, detector = on_device_of(reader, device), None
        if stage == TrainerFn.FITTING:
            others = [*callbacks_of(trainer), getattr(trainer, "datamodule", None), trainer]
            detector = LeakDetector(
                on_device,
                warn_after=self.warn_after,
                find_names=lambda: names_of_variables() | names_of_run(pl_module, others),
            )
        self._releaser = MemoryReleaser(reader, on_device, min_share=self.min_reclaimable, leak_detector=detector)
        self._directory, self._has_evaluated = report_directory(trainer), False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory after the sanity check. The memory still allocated is the baseline for later measurements."""
        put_on_device(pl_module, trainer.optimizers)
        self._warn_of_leak(trainer, self._release(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Release memory after a mid-epoch validation. Until now, Lightning still held the last validation batch."""
        if self._has_evaluated:
            self._end_evaluation(trainer, batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory if an evaluation has just ended, and measure the memory that is retained after the epoch."""
        retained = self._end_evaluation(trainer) if self._has_evaluated else self._collect(trainer)
        # Where only every n-th epoch validates, those without a validation are not comparable.
        every = (trainer.check_val_every_n_epoch or 1) if trainer.enable_validation else 1
        if (trainer.current_epoch + 1) % every == 0 and not self._counts_evaluations(trainer):
            self._warn_of_leak(trainer, retained)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory. By now, a strategy that moves the model to the CPU after training has done so."""
        self._release(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release memory before an evaluation or the sanity check."""
        put_on_device(pl_module, trainer.optimizers)
        self._release(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that an evaluation has ended. Memory is released later, once Lightning has dropped the last batch."""
        self._has_evaluated = not trainer.sanity_checking

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release memory after an evaluation outside of fit, and drop all state of the run."""
        if self._has_evaluated:
            self._release(trainer)
        self.stop_watching()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drop all state of the run."""
        self.stop_watching()

    def stop_watching(self) -> None:
        """Stop watching, and drop all state of the run. Idempotent."""
        self._releaser = None

    def _end_evaluation(self, trainer: Trainer, inputs: Any = None) -> RetainedMemory | None:
        """Release memory after an evaluation in fit, and return what is still allocated, without the batch `inputs`."""
        self._has_evaluated = False
        retained = self._release(trainer, inputs)
        if self._counts_evaluations(trainer):
            self._warn_of_leak(trainer, retained)
        return retained

    def _release(self, trainer: Trainer, inputs: Any = None) -> RetainedMemory | None:
        """Release unused memory. Log and return how much is still allocated, not counting the batch `inputs`."""
        if self._releaser is None:
            return None
        released, retained = self._releaser.release(trainer.lightning_module, trainer.optimizers, inputs=inputs)
        scalars = released.scalars() | ({} if self._releaser.leak_detector is None else retained.scalars())
        log_scalars(trainer, scalars, training_step(trainer))
        self._say(trainer, self._releaser.cannot_empty)
        return retained

    def _collect(self, trainer: Trainer) -> RetainedMemory | None:
        """Collect garbage if memory has grown, then log and return the memory that is still allocated."""
        if self._releaser is None:
            return None
        retained = self._releaser.collect(trainer.lightning_module, trainer.optimizers)
        log_scalars(trainer, retained.scalars(), training_step(trainer))
        return retained

    def _warn_of_leak(self, trainer: Trainer, retained: RetainedMemory | None) -> None:
        """Pass the memory that is still allocated to the leak detector, and warn if it finds a leak."""
        report = None if self._releaser is None or retained is None else self._releaser.find_leak(retained)
        if self._releaser is None or report is None:
            return
        name = self._releaser.reader.name
        text = report.text(
            device=f"{name} of rank {trainer.global_rank}" if trainer.world_size > 1 else name,
            readings="evaluations" if self._counts_evaluations(trainer) else "epochs",
        )
        warnings.warn(text, FindingWarning, stacklevel=2)
        log_scalars(trainer, {"memory/leaks": float(len(report.findings))}, training_step(trainer))
        log_text(trainer, "memtools/leak", text, training_step(trainer))
        if trainer.is_global_zero:
            write_report_or_warn(self._directory, "leak.md", text)

    def _counts_evaluations(self, trainer: Trainer) -> bool:
        """Return True if the run has so few epochs that growth is measured between evaluations, not between epochs."""
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            return trainer.max_epochs < self.warn_after
        batches = trainer.max_steps * trainer.accumulate_grad_batches
        return batches >= 0 and batches < self.warn_after * trainer.num_training_batches

    def _say(self, trainer: Trainer, message: str) -> None:
        if message and trainer.is_global_zero and self._is_new(message):
            logging.getLogger("lightning_memtools").info(message)
