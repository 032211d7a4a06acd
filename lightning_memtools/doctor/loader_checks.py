"""Checks of the data: a last batch of one sample, shared memory, batches changed in place, and waiting for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_memtools._torch import AnyBatchNorm, write_count
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.step_trial import place_of_error, trial_of, try_step
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.loader_sizes import batch_size_of, drops_last, n_samples_of
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.owned import storage_of
from lightning_memtools.memory.shared_memory import free_in_container, free_shared_memory
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.phrases import counted, first_of

_TOO_FEW = ("Expected more than 1 value per channel", "Expected more than 1 spatial element")


class BatchNormOneSample:
    """Check: a last batch of one sample, on which a normalizing layer in train mode raises."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case

    def batch_start(self, batch: Any, index: int) -> Iterator[Finding]:
        """Run a one-sample batch on fake tensors if the loader will give one."""
        case = self._case
        size, n_samples = batch_size_of(case.train_loader), n_samples_of(case.train_loader)
        if index or size is None or n_samples is None or not _normalizes(case) or not _ends_with_one(case):
            return
        facts = try_step(case, batch, size=1)
        if facts.error is None or trial_of(case, batch).error is not None:
            return  # the check named "trial" reports a step that fails whatever the size
        if not any(text in str(facts.error) for text in _TOO_FEW):
            return
        per_rank = f" on each of {case.world_size} ranks" if case.world_size > 1 else ""
        yield Finding(
            "batch_norm_one_sample",
            "error",
            place_of_error(facts.error, case.model),
            f"{n_samples} samples{per_rank} in batches of {size} leave a last batch of one sample, and a trial with "
            f"one sample on fake tensors raised: {str(facts.error).splitlines()[0]}",
            "The first epoch ends with this error.",
            "DataLoader(..., drop_last=True), or a batch size that leaves no single sample.",
        )


def _normalizes(case: TrainingCase) -> bool:
    kinds = (AnyBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    modules = [module for module in case.model.modules() if isinstance(module, kinds) and module.training]
    # SyncBatchNorm counts the samples of all ranks.
    return any(case.world_size == 1 or not isinstance(module, nn.SyncBatchNorm) for module in modules)


def _ends_with_one(case: TrainingCase) -> bool:
    size, n_samples = batch_size_of(case.train_loader), n_samples_of(case.train_loader)
    # Another batch sampler, or a loader's own __iter__, may form batches of its own sizes.
    loader: Any = case.train_loader
    is_plain = (
        type(getattr(loader, "batch_sampler", None)) is BatchSampler and type(loader).__iter__ is DataLoader.__iter__
    )
    if not is_plain or not size or not n_samples or drops_last(case.train_loader):
        return False
    n_batches = -(-n_samples // size)
    is_reached = case.n_train_batches is None or case.n_train_batches >= n_batches
    return is_reached and (size == 1 or n_samples % size == 1)


class SharedMemory:
    """Check: loader workers need more shared memory than there is."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._free: int | None = None

    def before_training(self) -> Iterator[Finding]:
        """Read what is free before the workers fill it."""
        limits = [limit for limit in (free_shared_memory(), free_in_container()) if limit is not None]
        self._free = min(limits, default=None)
        yield from ()

    def batch_start(self, batch: Any, index: int) -> Iterator[Finding]:
        """Compare the first batch's need with what was free."""
        case = self._case
        loaders = [
            loader for loader in (case.train_loader, *case.evaluation_loaders) if getattr(loader, "num_workers", 0)
        ]
        if index or not loaders or self._free is None:
            return
        batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
        ahead = [loader.num_workers * (loader.prefetch_factor or 0) for loader in loaders]
        need = sum(ahead) * batch_bytes * case.local_ranks
        if need <= self._free:
            return
        workers = " + ".join(
            f"{counted(loader.num_workers, 'worker', 'workers')} x "
            f"{counted(loader.prefetch_factor, 'batch', 'batches')}"
            for loader in loaders
        )
        ranks = f", on {case.local_ranks} ranks," if case.local_ranks > 1 else ""
        yield Finding(
            "shared_memory",
            "warning",
            "DataLoader",
            f"{workers} of {format_size(batch_bytes)}{ranks} need {format_size(need)} of shared memory when all are "
            f"ready, and {format_size(self._free)} were free.",
            "Workers die with a bus error (insufficient shared memory) as soon as loading runs ahead of training.",
            "Fewer workers or a smaller prefetch_factor, or more shared memory: docker run --shm-size or --ipc=host.",
        )


class ChangedBatch:
    """Check: the step writes into the batch in place."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._counts: list[tuple[Tensor, int]] = []
        self._is_reported = False

    def batch_start(self, batch: Any, _index: int) -> Iterator[Finding]:
        """Note how often each tensor was written."""
        self._counts = (
            [] if self._is_reported else [(t, write_count(t)) for t in tensors_in(batch) if _counts_writes(t)]
        )
        yield from ()

    def batch_end(self, _batch: Any, index: int) -> Iterator[Finding]:
        """Compare."""
        changed = [tensor for tensor, count in self._counts if write_count(tensor) != count]
        self._counts = []
        if not changed:
            return
        self._is_reported = True
        shapes = first_of([f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in changed])
        is_kept = self._belongs_to_data(changed)
        yield Finding(
            "changed_batch",
            "warning" if is_kept else "info",
            "training_step",
            f"The step of batch {index} wrote in place into {shapes} of its batch"
            + (", whose memory is the data set's own." if is_kept else "."),
            "The next epoch gets changed data."
            if is_kept
            else "Whoever reads the batch after the step sees other data.",
            "Work on a copy: x = x.clone(), or x = x - mean in place of x -= mean.",
        )

    def _belongs_to_data(self, changed: list[Tensor]) -> bool:
        loader = self._case.train_loader
        kept = loader if isinstance(loader, (list, tuple)) else getattr(loader, "dataset", None)
        storages = {found[0] for tensor in tensors_in(kept) if (found := storage_of(tensor)) is not None}
        return any(found[0] in storages for tensor in changed if (found := storage_of(tensor)) is not None)


def _counts_writes(tensor: Tensor) -> bool:
    return not tensor.is_inference()


class DataWaiting:
    """Check: most of the time goes into waiting for the loader."""

    # The first steps fill caches and start workers.
    WARM_UP = 3
    MIN_SHARE = 0.5
    MIN_WAIT_S = 0.002

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._ended_at: float | None = None
        self._began_at = 0.0
        self._waits: list[float] = []
        self._steps: list[float] = []
        self._n_idle = 0

    def batch_start(self, _batch: Any, _index: int) -> Iterator[Finding]:
        """The wait is over."""
        self._began_at = time.perf_counter()
        if self._ended_at is not None:
            self._waits.append(self._began_at - self._ended_at)
            # True where all work is done: the device has nothing left to do when its next batch comes.
            self._n_idle += self._case.device.type != "cuda" or torch.cuda.current_stream(self._case.device).query()
        yield from ()

    def batch_end(self, _batch: Any, _index: int) -> Iterator[Finding]:
        """The step is over."""
        self._ended_at = time.perf_counter()
        self._steps.append(self._ended_at - self._began_at)
        yield from ()

    def evaluation_end(self) -> Iterator[Finding]:
        """Do not count an evaluation as waiting."""
        self._ended_at = None
        yield from ()

    def conclude(self) -> Iterator[Finding]:
        """Compare the time of the waits with that of the steps."""
        waits, steps = self._waits[self.WARM_UP :], self._steps[self.WARM_UP :]
        if self._case.computes_nothing or len(waits) < self.WARM_UP or self._n_idle < len(self._waits) / 2:
            return
        share = sum(waits) / (sum(waits) + sum(steps))
        if share < self.MIN_SHARE or sum(waits) / len(waits) < self.MIN_WAIT_S:
            return
        device = self._case.device.type
        yield Finding(
            "data_waiting",
            "info" if device == "cpu" else "warning",
            "DataLoader",
            f"{share:.0%} of the time of {len(waits)} steps passed between two steps, "
            f"{1e3 * sum(waits) / len(waits):.1f} ms each, against {1e3 * sum(steps) / len(steps):.1f} ms in the step.",
            f"Training waits for data{'' if device == 'cpu' else ', and the device is idle meanwhile'}.",
            "DataLoader(num_workers=..., persistent_workers=True, pin_memory=True), or prepare the data once.",
        )
