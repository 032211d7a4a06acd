"""What is done where one stage of a run ends and another begins: collect, give back, keep the ledger."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.host import blocks_to_walk
from lightning_memtools.memory.owned import OnDevice, Owned, owned_by
from lightning_memtools.memory.reclaim import WorthReclaiming, reclaim
from lightning_memtools.memory.sizes import to_gib
from lightning_memtools.memory.stats import MemoryReader, MemoryStats

# About what a full collection takes for each block of memory that Python has given out: 0.58 s were measured with 19
# million blocks of lists of a few numbers, 0.2 s with the 1.5 million that torch and Lightning make when imported.
SECONDS_PER_BLOCK = 1e-7


@dataclass(frozen=True, slots=True)
class _Allowance:
    """What a collection may take: so many seconds, or such a share of the time since the last one."""

    seconds: float
    share: float


FOR_MEMORY = _Allowance(0.5, 0.01)
"""Where it could free what is worth giving back."""
FOR_EXACTNESS = _Allowance(0.05, 0.002)
"""Where it could only make a figure exact. Evaluation is a part of the time, and is to pay no more than 1%."""


@dataclass(frozen=True, slots=True)
class Retained:
    """What stays allocated at a boundary, in bytes.

    Attributes:
        total: Allocated, without the inputs that are expected to be there.
        unaccounted: The part of it that neither the model nor its optimizers own.
        owned: What they do own.
    """

    total: int
    unaccounted: int
    owned: Owned

    def scalars(self) -> dict[str, float]:
        """The total and its parts under the names of the logs."""
        parts = {name: self.owned.by_category[name] for name in ("parameters", "gradients", "optimizer")}
        parts["other"] = self.total - sum(parts.values())
        tags = {f"memory/retained/{name}_gib": to_gib(n_bytes) for name, n_bytes in parts.items()}
        return {"memory/retained_gib": to_gib(self.total), **tags}


@dataclass(frozen=True, slots=True)
class GivenBack:
    """What a boundary gave back, and what that took.

    Attributes:
        freed_bytes: What went back to the device.
        elapsed_ms: Collection and emptying together, with the wait for the device that freeing its memory means.
    """

    freed_bytes: int
    elapsed_ms: float

    def scalars(self) -> dict[str, float]:
        """Both under the names of the logs."""
        return {"memory/cache/freed_gib": to_gib(self.freed_bytes), "memory/cache/ms": self.elapsed_ms}


class Boundaries:
    """The work at boundaries on one device.

    A full garbage collection takes 0.1 to 0.5 s per million objects, so it is done only where it can bring something:
    where more is allocated than the model and its optimizers own, and more so than after the last collection. In a
    healthy run that is two or three times at its beginning. How long it may take depends on what it can bring: what is
    worth giving back, or no more than an exact figure. Where it takes longer, it waits until it is little of the time
    since the last one; the time of the first is guessed from how many blocks of memory Python has given out. Smaller
    generations would be cheaper, but Python collects those by itself all the time; what holds on to memory is in the
    oldest.

    Args:
        reader: The device.
        on_device: Which tensors are its.
        worth_reclaiming: Decides when the cache is emptied.
        collect_garbage: Whether to collect at all.
    """

    def __init__(
        self,
        reader: MemoryReader,
        on_device: OnDevice,
        *,
        worth_reclaiming: WorthReclaiming,
        collect_garbage: bool = True,
    ) -> None:
        self.reader = reader
        self.cannot_empty: str = ""
        self._on_device = on_device
        self._worth_reclaiming = worth_reclaiming
        self._collect_garbage = collect_garbage
        self._unaccounted_after_collection = 0
        # What the last one took, or the first would take.
        self._collection_s = SECONDS_PER_BLOCK * blocks_to_walk()
        self._last_collection = time.perf_counter()

    def collect(
        self, model: nn.Module, optimizers: Iterable[Optimizer], *, inputs: Any = None, exact: bool = True
    ) -> Retained:
        """Collect garbage if it can bring something, and say what stays.

        Args:
            model: What is meant to stay, with its gradients.
            optimizers: Whose state is meant to stay.
            inputs: Tensors that are expected to be there for the moment.
            exact: Whether garbage too small to be worth giving back must not be counted among what stays.
        """
        owned = owned_by(model, optimizers, self._on_device, inputs=inputs)
        stats = self.reader.stats()
        retained = _retained(stats, owned)
        growth = retained.unaccounted - self._unaccounted_after_collection
        worth = growth >= self._worth_reclaiming.minimum_bytes(stats)
        if growth > 0 and (worth or exact) and self._can_afford_one(FOR_MEMORY if worth else FOR_EXACTNESS):
            return self.collect_now(owned)
        self._unaccounted_after_collection = min(self._unaccounted_after_collection, retained.unaccounted)
        return retained

    def collect_now(self, owned: Owned) -> Retained:
        """Collect whatever it takes, unless it was asked not to, and say what stays."""
        if self._collect_garbage:
            begin = time.thread_time()  # of this thread alone: other work on the machine must not count
            gc.collect()
            self._collection_s = time.thread_time() - begin
            self._last_collection = time.perf_counter()
        retained = _retained(self.reader.stats(), owned)
        self._unaccounted_after_collection = retained.unaccounted
        return retained

    def give_back(
        self, model: nn.Module, optimizers: Iterable[Optimizer], *, inputs: Any = None, exact: bool = True
    ) -> tuple[GivenBack, Retained]:
        """Collect, as `collect` does, then empty the cache if that is worth it. Waits for the device if so."""
        begin = time.perf_counter()
        retained = self.collect(model, optimizers, inputs=inputs, exact=exact)
        freed_bytes = 0
        if not self.cannot_empty and self._worth_reclaiming(self.reader.stats()):
            freed_bytes = self._reclaim()
        return GivenBack(freed_bytes, 1000 * (time.perf_counter() - begin)), retained

    def _can_afford_one(self, allowed: _Allowance) -> bool:
        since_s = time.perf_counter() - self._last_collection
        return self._collection_s <= max(allowed.seconds, allowed.share * since_s)

    def _reclaim(self) -> int:
        try:
            return reclaim(self.reader)
        except torch.AcceleratorError:  # a kernel failed: that is not ours to hide
            raise
        except (NotImplementedError, RuntimeError) as error:
            self.cannot_empty = f"{self.reader.name} cannot empty its cache: {error}"
            return 0


def _retained(stats: MemoryStats, owned: Owned) -> Retained:
    allocated = stats.allocated or 0
    # Inputs that are views of something larger can seem to take more than there is.
    return Retained(max(0, allocated - owned.by_category["inputs"]), max(0, allocated - owned.total_bytes), owned)
