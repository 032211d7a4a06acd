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
    """The time that a garbage collection may take: `seconds` or, if longer, `share` of the time since the last one."""

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
        total: The allocated memory, excluding a batch that belongs on the device.
        unaccounted: The part of `total` that neither the model nor its optimizers own.
        owned: The memory that the model and its optimizers own.
    """

    total: int
    unaccounted: int
    owned: Owned

    def scalars(self) -> dict[str, float]:
        """Return the total and its parts in GiB, by log tag."""
        parts = {name: self.owned.by_category[name] for name in ("parameters", "gradients", "optimizer")}
        parts["other"] = self.total - sum(parts.values())
        tags = {f"memory/retained/{name}_gib": to_gib(n_bytes) for name, n_bytes in parts.items()}
        return {"memory/retained_gib": to_gib(self.total), **tags}


@dataclass(frozen=True, slots=True)
class ReleasedMemory:
    """The memory that was released between two stages, and the time that it took.

    Attributes:
        freed_bytes: The memory that the device got back.
        elapsed_ms: The time that collecting garbage and emptying the cache took, including the wait for the device.
    """

    freed_bytes: int
    elapsed_ms: float

    def scalars(self) -> dict[str, float]:
        """Return the released GiB and the elapsed time, by log tag."""
        return {"memory/cache/freed_gib": to_gib(self.freed_bytes), "memory/cache/ms": self.elapsed_ms}


class MemoryReleaser:
    """Collects garbage and empties the cache of one device when that is worth the time.

    A full garbage collection takes 0.1 to 0.5 s per million objects. So it runs only if it can free something: if the
    memory that neither the model nor its optimizers own has grown since the last collection. In a healthy run that
    happens two or three times, at the beginning. It may take longer if it can free memory that is worth releasing than
    if it only makes a reading exact. A slower collection waits until its time is a small part of the time since the
    last one; the time of the first is estimated from the number of memory blocks that Python has allocated. Collecting
    younger generations would be cheaper, but Python does that by itself all the time; the objects that hold much memory
    are in the oldest generation.

    Args:
        reader: Reads the device's memory.
        on_device: Returns whether a tensor is on the device.
        min_share: The least memory that is worth releasing, as later steps have to request it again: a share of the
            device's capacity, or of the reserved memory if the capacity is not known.
        leak_detector: Receives the readings of `find_leak`; None for no search for leaks.

    Attributes:
        cannot_empty: The reason why the device cannot empty its cache, once an attempt has failed; otherwise "".
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
        """Collect garbage if that can free something, and return what stays allocated.

        Args:
            model: The model, which stays allocated with its gradients.
            optimizers: The optimizers, whose state stays allocated.
            inputs: Tensors that belong on the device now, such as a batch; `RetainedMemory.total` excludes them.
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
        """Collect garbage however long it takes, and return what stays allocated."""
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
        """Collect garbage as `collect` does, and empty the cache if worthwhile; return the freed and kept memory."""
        begin = time.perf_counter()
        retained = self.collect(model, optimizers, inputs=inputs)
        stats, freed_bytes = self.reader.stats(), 0
        if not self.cannot_empty and reclaimable_bytes(stats) >= max(1, self._minimum_bytes(stats)):
            freed_bytes = self._empty_cache()
        return ReleasedMemory(freed_bytes, 1000 * (time.perf_counter() - begin)), retained

    def find_leak(self, retained: RetainedMemory) -> LeakReport | None:
        """Pass this reading to the leak detector, and return its report if it finds a leak."""
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
    """Return the memory that emptying the cache could release: whole free segments.

    Reserved memory is in use (active), or free beside used blocks of the same segment (inactive split, which stays), or
    free as whole segments. The last is the difference of three counters that the allocator keeps anyway; walking
    `memory_snapshot` would cost milliseconds for the same number. Two things make it an upper bound: segments of
    private pools (CUDA graphs) stay while their graph lives, and expandable segments release whole pages only. On a
    device that does not count splits (MPS), it is an upper bound too.
    """
    if stats.reserved is None:
        return 0
    used = stats.active if stats.active is not None else stats.allocated
    return max(0, stats.reserved - (used or 0) - (stats.inactive_split or 0))


def empty_cache(reader: MemoryReader) -> int:
    """Empty the cache and return the number of bytes that were released. Freeing memory waits for the device."""
    before = reader.stats().reserved or 0
    reader.empty_cache()
    return max(0, before - (reader.stats().reserved or 0))


def _retained(stats: MemoryStats, owned: Owned) -> RetainedMemory:
    allocated = stats.allocated or 0
    # Inputs that are views of something larger can seem to occupy more than is allocated.
    return RetainedMemory(max(0, allocated - owned.by_category["inputs"]), max(0, allocated - owned.total_bytes), owned)


def free_failed_backward() -> None:
    """Free the tensors that a backward pass still holds after it has raised. Nothing else refers to them.

    Autograd's queue of this thread keeps the nodes that were not run yet, with the tensors they saved, until the next
    backward pass removes them. So this runs a small one.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        torch.ones(1, device="cpu", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
