"""Limits of the batch size: those that do not depend on the device's memory, with reasons, and the margin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_memtools._torch import AnyBatchNorm
from lightning_memtools.memory.shared_memory import free_shared_memory
from lightning_memtools.memory.sizes import parse_size


@dataclass(slots=True, kw_only=True)
class SizeLimits:
    """The admitted batch sizes of one stage. The attributes that depend on the data are set once the data are known.

    Attributes:
        max_val: No larger size is admitted.
        multiple_of: Only multiples of this are admitted.
        per_rank: With an effective batch size: samples per optimizer step and rank, a multiple of each admitted size.
        n_samples: Samples per rank and epoch; None if unknown.
        min_batches: The fewest batches of an epoch with which the Trainer's own settings still work.
        drop_last: True if the loader leaves out an incomplete last batch.
        avoid_single: True if no batch may have a single sample: BatchNorm raises on it in training.
        shm: The most samples per batch for which the workers' batches fit in shared memory.
    """

    max_val: int | None = None
    multiple_of: int = 1
    per_rank: int | None = None
    n_samples: int | None = None
    min_batches: float = 1.0
    drop_last: bool = False
    avoid_single: bool = False
    shm: int | None = None

    def round_down(self, size: float) -> int:
        """Returns the largest admitted size at or below `size`; 0 if there is none.

        Without any limit, infinity gives 2^62.
        """
        highest = min(size, *(bound for bound in self._bounds().values() if bound is not None), math.inf)
        candidate = 2**62 if math.isinf(highest) else max(int(highest), 0)
        candidate -= candidate % self.multiple_of
        while candidate > 0 and (self._splits_unevenly(candidate) or self._leaves_single_sample(candidate)):
            candidate -= self.multiple_of
        return candidate

    def smallest(self) -> int:
        """Returns the smallest admitted size.

        Raises:
            ValueError: No size is admitted.
        """
        largest = self.round_down(math.inf)
        candidate = self.multiple_of
        while candidate <= largest:
            if self.round_down(candidate) == candidate:
                return candidate
            candidate += self.multiple_of
        shared_memory = f", shared memory for {self.shm} samples per batch" if self.shm is not None else ""
        raise ValueError(
            f"No batch size is possible: {self.n_samples} samples per rank, multiple_of={self.multiple_of}, "
            f"max_val={self.max_val}, effective batch size per rank {self.per_rank}{shared_memory}. "
            "Relax one of them."
        )

    def reasons_against(self, size: int) -> list[str]:
        """Returns why a size is not admitted, in words for a report. `max_val` and `multiple_of` are not listed."""
        reasons = [
            reason
            for reason, bound in self._bounds().items()
            if bound is not None and bound < size and reason != "max_val"
        ]
        if self._splits_unevenly(size) and "the effective batch size" not in reasons:
            reasons.append("the effective batch size")
        if self._leaves_single_sample(size):
            reasons.append("a last batch of one sample in front of BatchNorm")
        return sorted(reasons)

    def _bounds(self) -> dict[str, float | None]:
        return {
            "max_val": self.max_val,
            "the workers' shared memory": self.shm,
            "the number of samples": None if self.n_samples is None else self.n_samples / self.min_batches,
            "the effective batch size": self.per_rank,
        }

    def _splits_unevenly(self, size: int) -> bool:
        return self.per_rank is not None and self.per_rank % size != 0

    def _leaves_single_sample(self, size: int) -> bool:
        if not self.avoid_single:
            return False
        has_last_batch = self.n_samples is not None and not self.drop_last
        return size == 1 or (has_last_batch and (self.n_samples or 0) % size == 1)


def checked_margin(margin: float | str) -> float | int:
    """Returns the share of the capacity (a float), or the bytes (an int), that have to stay free.

    Raises:
        ValueError: A share outside [0, 1), or a text that is not a size.
    """
    if isinstance(margin, str):
        return parse_size(margin)
    if not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise ValueError(f"margin={margin!r} must be a share in [0, 1), or a size such as '1GiB'.")
    return float(margin)


def limit_of(capacity: int, margin: float) -> int:
    """Returns the bytes of a device that may be used; a margin is a share (float) or bytes (int)."""
    return capacity - margin if isinstance(margin, int) else int(capacity * (1 - margin))


def samples_per_rank(effective_batch_size: int, n_ranks: int) -> int:
    """Returns the samples per optimizer step of each rank.

    Raises:
        ValueError: The effective batch size is not a multiple of the number of ranks.
    """
    if effective_batch_size % n_ranks:
        raise ValueError(
            f"effective_batch_size={effective_batch_size} cannot be shared evenly by {n_ranks} ranks. "
            f"Choose a multiple of {n_ranks}, such as {effective_batch_size // n_ranks * n_ranks or n_ranks}."
        )
    return effective_batch_size // n_ranks


def normalizes_batches(model: nn.Module) -> bool:
    """Returns True if training may raise on a batch of one sample: a BatchNorm takes its statistics from it."""
    return any(isinstance(module, AnyBatchNorm) and module.training for module in model.modules())


def samples_in_shared_memory(
    bytes_per_sample: float,
    loaders: Sequence[object],
    free_bytes: Callable[[], int | None] | None = None,
) -> int | None:
    """Returns the most samples per batch for which all batches that workers hold ready fit in shared memory.

    Workers hand batches over in /dev/shm, `prefetch_factor` batches each. None where there are no workers, or no
    /dev/shm.

    Args:
        bytes_per_sample: Size of a sample as workers send it.
        loaders: The loaders that work at the same time.
        free_bytes: Returns the free shared memory; by default the system is asked.
    """
    ahead = sum(getattr(one, "num_workers", 0) * (getattr(one, "prefetch_factor", None) or 0) for one in loaders)
    if not ahead or bytes_per_sample <= 0:
        return None
    free = (free_bytes or free_shared_memory)()
    # One batch more: the batch in use is freed only after the next one was requested.
    return None if free is None else max(int(free / (bytes_per_sample * (ahead + 1))), 1)
