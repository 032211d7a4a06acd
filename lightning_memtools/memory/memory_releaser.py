"""Releases memory between the stages of a run: collects garbage, empties the cache, reports what stays."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.leaks.leak_detector import LeakDetector, LeakReport
from lightning_memtools.memory.leaks.tensor_census import blocks_to_walk
from lightning_memtools.memory.owned import OnDevice, Owned, owned_by
from lightning_memtools.memory.sizes import to_gib
from lightning_memtools.memory.stats import MemoryReader, MemoryStats

# The approximate time of a full collection for each block of memory that Python has allocated: 0.58 s were measured
# with 19 million blocks of lists of a few numbers, 0.2 s with the 1.5 million of torch and Lightning when imported.
SECONDS_PER_BLOCK = 1e-7


@dataclass(frozen=True, slots=True)
class _Allowance:
    """The time allowed for a collection: the longer of `seconds` and `share` x (time since the last collection)."""

    seconds: float
    share: float


FOR_MEMORY = _Allowance(0.5, 0.01)
"""For a collection that could free enough memory to be worth releasing."""
FOR_EXACTNESS = _Allowance(0.05, 0.002)
"""For a collection that only makes a figure exact: it must cost less than 1% of the time of the evaluations alone."""


@dataclass(frozen=True, slots=True)
class RetainedMemory:
    """The memory that is still allocated at the end of a stage, in bytes.

    Attributes:
        total: The allocated memory, excluding a batch that is still in use.
        unaccounted: The part of `total` that neither the model nor its optimizers own.
        owned: The memory that the model and its optimizers own.
    """

    total: int
    unaccounted: int
    owned: Owned

    def scalars(self) -> dict[str, float]:
        """Return the total and its parts in GiB, as a dict by log tag."""
        parts = {name: self.owned.by_category[name] for name in ("parameters", "gradients", "optimizer")}
        parts["other"] = self.total - sum(parts.values())
        tags = {f"memory/retained/{name}_gib": to_gib(n_bytes) for name, n_bytes in parts.items()}
        return {"memory/retained_gib": to_gib(self.total), **tags}


@dataclass(frozen=True, slots=True)
class ReleasedMemory:
    """The memory that was released between two stages, and the time that it took.

    Attributes:
        freed_bytes: The memory that the allocator gave back to the device.
        elapsed_ms: The time that collecting garbage and emptying the cache took, including the wait for the device.
    """

    freed_bytes: int
    elapsed_ms: float

    def scalars(self) -> dict[str, float]:
        """Return the released GiB and the elapsed time, as a dict by log tag."""
        return {"memory/cache/freed_gib": to_gib(self.freed_bytes), "memory/cache/ms": self.elapsed_ms}


class MemoryReleaser:
    """Collects garbage and empties a device's cache, each only when it is worth the time.

    A full garbage collection takes 0.1 to 0.5 s per million objects. It runs only if the memory that neither the model
    nor its optimizers own has grown since the last collection. In a healthy run this happens two or three times, early
    in the run. A slow collection is put off until its time is a small fraction of the time since the last collection.
    The fraction is larger if the collection may free much memory, and smaller if it only makes a reading exact.
    The time of the first collection is estimated from the number of memory blocks that Python has allocated.
    Collecting only the younger generations would be cheaper, but Python does that anyway, and the objects that hold
    much memory are in the oldest generation.

    Args:
        reader: Reads the device's memory.
        on_device: Returns whether a tensor is on the device.
        min_share: The least memory that is worth releasing, as a fraction of the device's capacity (or of the reserved
            memory, if the capacity is not known). A smaller amount is kept for later steps.
        leak_detector: The detector to which `find_leak` passes its readings; None to search for no leaks.

    Attributes:
        cannot_empty: The reason why emptying the cache failed; "" as long as it has not failed.
    """

    def __init__(
        self,
        reader: MemoryReader,
        on_device: OnDevice,
        *,
        min_share: float,
        leak_detector: LeakDetector | None = None,
    ) -> None:
        self.reader = reader
        self.leak_detector = leak_detector
        self.cannot_empty: str = ""
        self.on_device = on_device
        self._min_share = min_share
        self._unaccounted_after_collection = 0
        # The time of the last collection; before the first an estimate.
        self._collection_s = SECONDS_PER_BLOCK * blocks_to_walk()
        self._last_collection = time.perf_counter()

    def collect(self, model: nn.Module, optimizers: Iterable[Optimizer], *, inputs: Any = None) -> RetainedMemory:
        """Collect garbage if that is worth the time, and return the memory that stays allocated.

        Args:
            model: The model, which stays allocated with its gradients.
            optimizers: The optimizers, whose state stays allocated.
            inputs: Tensors that are still in use, such as a batch; `RetainedMemory.total` excludes them.
        """
        owned = owned_by(model, optimizers, self.on_device, inputs=inputs)
        stats = self.reader.stats()
        retained = _retained(stats, owned)
        growth = retained.unaccounted - self._unaccounted_after_collection
        is_worth_releasing = growth >= self._minimum_bytes(stats)
        allowance = FOR_MEMORY if is_worth_releasing else FOR_EXACTNESS
        if growth > 0 and self._can_afford_collection(allowance):
            return self.collect_now(owned)
        self._unaccounted_after_collection = min(self._unaccounted_after_collection, retained.unaccounted)
        return retained

    def collect_now(self, owned: Owned) -> RetainedMemory:
        """Collect garbage, however long it takes, and return the memory that stays allocated."""
        begin = time.thread_time()  # of this thread alone: other work on the machine must not count
        gc.collect()
        self._collection_s = time.thread_time() - begin
        self._last_collection = time.perf_counter()
        retained = _retained(self.reader.stats(), owned)
        self._unaccounted_after_collection = retained.unaccounted
        return retained

    def release(
        self, model: nn.Module, optimizers: Iterable[Optimizer], *, inputs: Any = None
    ) -> tuple[ReleasedMemory, RetainedMemory]:
        """Call `collect`, then empty the cache if it holds enough memory; return the released and retained memory."""
        begin = time.perf_counter()
        retained = self.collect(model, optimizers, inputs=inputs)
        stats, freed_bytes = self.reader.stats(), 0
        if not self.cannot_empty and reclaimable_bytes(stats) >= max(1, self._minimum_bytes(stats)):
            freed_bytes = self._empty_cache()
        return ReleasedMemory(freed_bytes, 1000 * (time.perf_counter() - begin)), retained

    def find_leak(self, retained: RetainedMemory) -> LeakReport | None:
        """Pass a reading of retained memory to the leak detector; return its report, or None if it finds no leak."""
        if self.leak_detector is None:
            return None
        return self.leak_detector.read(
            retained.unaccounted, retained.owned, collect=lambda: self.collect_now(retained.owned).unaccounted
        )

    def _minimum_bytes(self, stats: MemoryStats) -> float:
        return self._min_share * (stats.capacity or stats.reserved or 0)

    def _can_afford_collection(self, allowed: _Allowance) -> bool:
        since_s = time.perf_counter() - self._last_collection
        return self._collection_s <= max(allowed.seconds, allowed.share * since_s)

    def _empty_cache(self) -> int:
        try:
            return empty_cache(self.reader)
        except torch.AcceleratorError:  # a kernel failed, which must not be hidden
            raise
        except (NotImplementedError, RuntimeError) as error:
            self.cannot_empty = f"{self.reader.name} cannot empty its cache: {error}"
            return 0


def reclaimable_bytes(stats: MemoryStats) -> int:
    """Return an upper bound on the bytes that emptying the cache could release.

    The result is the reserved memory minus the memory in use (active) and the free memory in partly used segments
    (inactive split). The allocator keeps these three counters anyway, whereas reading `memory_snapshot` would take
    milliseconds. The cache may release less: CUDA graphs keep their segments, expandable segments are released in
    whole pages, and MPS does not report the free memory in partly used segments.
    """
    if stats.reserved is None:
        return 0
    used = stats.active if stats.active is not None else stats.allocated
    return max(0, stats.reserved - (used or 0) - (stats.inactive_split or 0))


def empty_cache(reader: MemoryReader) -> int:
    """Empty the cache and return the number of bytes that were released. This waits for the device."""
    before = reader.stats().reserved or 0
    reader.empty_cache()
    return max(0, before - (reader.stats().reserved or 0))


def _retained(stats: MemoryStats, owned: Owned) -> RetainedMemory:
    allocated = stats.allocated or 0
    # Inputs that are views of something larger can seem to occupy more than is allocated.
    return RetainedMemory(max(0, allocated - owned.by_category["inputs"]), max(0, allocated - owned.total_bytes), owned)


def free_failed_backward() -> None:
    """Free the tensors that a failed backward pass still holds, by running another, tiny backward pass.

    Autograd's queue in this thread keeps the nodes that have not run yet, with their saved tensors, until the next
    backward pass clears the queue.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        torch.ones(1, device="cpu", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
