"""Which sizes may be tried at all, whatever memory says, and why."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(slots=True, kw_only=True)
class Limits:
    """The admitted sizes of one stage. What the data say is filled in once they are known.

    Attributes:
        max_val: No larger size.
        multiple_of: Only multiples of this.
        per_rank: With an effective batch size: samples per optimizer step and rank, which the size has to divide.
        n_samples: Samples per rank and epoch; None where nobody knows.
        min_batches: How many batches an epoch must have at least, so that the Trainer's own settings still work.
        drop_last: Whether an incomplete last batch is left out.
        avoid_single: Whether a last batch of one sample must not occur: BatchNorm raises on it in training.
        shm: The most samples per batch that the workers' shared memory can hold.
        cut: Why `round_down` gave less than was asked of it, in words.
    """

    max_val: int | None = None
    multiple_of: int = 1
    per_rank: int | None = None
    n_samples: int | None = None
    min_batches: float = 1.0
    drop_last: bool = False
    avoid_single: bool = False
    shm: int | None = None
    cut: set[str] = field(default_factory=set)

    def round_down(self, size: float) -> int:
        """The largest admitted size at or below `size`; 0 where there is none. Infinity is returned as a huge size."""
        highest = size
        bounds: dict[str, float | None] = {
            "max_val": self.max_val,
            "the workers' shared memory": self.shm,
            "the number of samples": None if self.n_samples is None else self.n_samples / self.min_batches,
            "the effective batch size": self.per_rank,
        }
        for reason, bound in bounds.items():
            if bound is not None and bound < highest:
                highest = bound
                self.cut.add(reason)
        candidate = 2**62 if math.isinf(highest) else max(int(highest), 0)
        candidate -= candidate % self.multiple_of
        while candidate > 0 and not self._is_admitted(candidate):
            candidate -= self.multiple_of
        return candidate

    def smallest(self) -> int:
        """The smallest admitted size.

        Raises:
            ValueError: No size is admitted.
        """
        largest = self.round_down(math.inf)
        candidate = self.multiple_of
        while candidate <= largest:
            if self._is_admitted(candidate):
                return candidate
            candidate += self.multiple_of
        raise ValueError(
            f"No batch size is possible: {self.n_samples} samples per rank, multiple_of={self.multiple_of}, "
            f"max_val={self.max_val}, effective batch size per rank {self.per_rank}"
            f"{f', shared memory for {self.shm} samples per batch' if self.shm is not None else ''}. "
            "Relax one of them."
        )

    def _is_admitted(self, size: int) -> bool:
        if self.per_rank is not None and self.per_rank % size:
            return False
        if self.avoid_single:
            if size == 1:
                return False
            if self.n_samples is not None and not self.drop_last and self.n_samples % size == 1:
                self.cut.add("a last batch of one sample in front of BatchNorm")
                return False
        return True


def samples_per_rank(effective_batch_size: int, n_ranks: int) -> int:
    """Samples per optimizer step that each rank takes.

    Raises:
        ValueError: The ranks cannot share them evenly.
    """
    if effective_batch_size % n_ranks:
        raise ValueError(
            f"effective_batch_size={effective_batch_size} cannot be shared evenly by {n_ranks} ranks. "
            f"Choose a multiple of {n_ranks}, such as {effective_batch_size // n_ranks * n_ranks or n_ranks}."
        )
    return effective_batch_size // n_ranks


def normalizes_batches(model: nn.Module) -> bool:
    """Whether a single sample may make training raise: there is a BatchNorm whose statistics come from the batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def samples_in_shared_memory(
    bytes_per_sample: float,
    loaders: Sequence[object],
    free_bytes: Callable[[], int | None] | None = None,
) -> int | None:
    """The most samples per batch for which all batches that workers hold ready fit in shared memory at once.

    Workers hand batches over in /dev/shm, `prefetch_factor` batches each. None where there are no workers, or no
    /dev/shm.

    Args:
        bytes_per_sample: Of a batch as workers send it.
        loaders: The loaders that work at the same time.
        free_bytes: Tells what is left of the shared memory; by default the system is asked.
    """
    ahead = sum(getattr(one, "num_workers", 0) * (getattr(one, "prefetch_factor", None) or 0) for one in loaders)
    if not ahead or bytes_per_sample <= 0:
        return None
    free = (free_bytes or free_shared_memory)()
    # One batch more: the one that is being worked on is freed only afterwards.
    return None if free is None else max(int(free / (bytes_per_sample * (ahead + 1))), 1)


def free_shared_memory() -> int | None:
    """Bytes left in /dev/shm; None where there is none."""
    place = Path("/dev/shm")  # noqa: S108, it is the place itself that is asked about
    return shutil.disk_usage(place).free if place.is_dir() else None
