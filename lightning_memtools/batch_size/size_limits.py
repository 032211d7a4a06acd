"""Checks the arguments of BatchSizeTuner, and says which batch sizes these and the data admit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_memtools.memory.peaks import Stage
from lightning_memtools.memory.sizes import is_count, parse_size
from lightning_memtools.memory.stats import MemoryReader

SEGMENT_BYTES = 20 * 2**20
"""The size of most segments of CUDA's caching allocator (kLargeBuffer in c10/core/AllocatorConfig.h)."""
STAGES: tuple[Stage, ...] = ("train", "val")
"""The stages that can be tuned: those of a fit."""


@dataclass(slots=True, kw_only=True)
class SizeLimits:
    """The batch sizes allowed in training or in validation. `n_samples` and `drop_last` are set by the first trial.

    Attributes:
        max_val: The largest size allowed; None for no limit.
        multiple_of: Only multiples of this number are allowed.
        per_rank: The number of samples per rank and optimizer step, a multiple of the batch size; None if it may vary.
        n_samples: The number of samples per rank and epoch; None if unknown.
        min_batches: The minimum number of batches per epoch, as required by settings such as `val_check_interval`.
        drop_last: True if the loader leaves out an incomplete last batch.
        avoid_single: True if no batch may consist of a single sample, for which BatchNorm raises an error in training.
    """

    max_val: int | None = None
    multiple_of: int = 1
    per_rank: int | None = None
    n_samples: int | None = None
    min_batches: float = 1.0
    drop_last: bool = False
    avoid_single: bool = False

    def round_down(self, size: float) -> int:
        """Return the largest allowed batch size up to `size` (which may be infinity); 0 if there is none."""
        highest = min(size, self.max_val or math.inf, self._most_by_data, self.per_rank or math.inf, 2**62)
        candidate = max(int(highest), 0) // self.multiple_of * self.multiple_of
        while candidate > 0 and (self._splits_unevenly(candidate) or self._leaves_single_sample(candidate)):
            candidate -= self.multiple_of
        return candidate

    def smallest(self) -> int:
        """Return the smallest allowed batch size.

        Raises:
            ValueError: No size is allowed.
        """
        for candidate in range(self.multiple_of, self.round_down(math.inf) + 1, self.multiple_of):
            if self.round_down(candidate) == candidate:
                return candidate
        raise ValueError(
            f"No batch size is possible: {self.n_samples} samples per rank, multiple_of={self.multiple_of}, "
            f"max_val={self.max_val}, effective batch size per rank {self.per_rank}. Relax one of them."
        )

    @property
    def _most_by_data(self) -> float:
        return math.inf if self.n_samples is None else self.n_samples / self.min_batches

    def _splits_unevenly(self, size: int) -> bool:
        return self.per_rank is not None and self.per_rank % size != 0

    def _leaves_single_sample(self, size: int) -> bool:
        rest = 0 if self.n_samples is None or self.drop_last else self.n_samples % size
        return self.avoid_single and (size == 1 or rest == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """Checks and holds the arguments of BatchSizeTuner, whose docstring describes them.

    Raises:
        ValueError: An argument is out of its range.
    """

    batch_arg_name: str
    margin: float | str
    init_val: int | None
    max_val: int | None
    multiple_of: int
    effective_batch_size: int | None
    stages: Sequence[str]
    max_trials: int

    def __post_init__(self) -> None:
        for name in ("init_val", "max_val", "multiple_of", "effective_batch_size", "max_trials"):
            value = getattr(self, name)
            if value is not None and not is_count(value):
                raise ValueError(f"{name}={value!r} must be a whole number from 1 on.")
        if isinstance(self.stages, str) or not self.stages or not all(stage in STAGES for stage in self.stages):
            raise ValueError(f"stages={self.stages!r} must be a sequence of some of {', '.join(STAGES)}.")
        self._most_of(1)

    def per_rank(self, n_ranks: int) -> int | None:
        """Return the number of samples per rank and optimizer step; None if no `effective_batch_size` is set.

        Raises:
            ValueError: The effective batch size is not a multiple of the number of ranks.
        """
        effective = self.effective_batch_size
        if effective is not None and effective % n_ranks:
            raise ValueError(f"effective_batch_size={effective} must be a multiple of the {n_ranks} ranks.")
        return None if effective is None else effective // n_ranks

    def limit(self, reader: MemoryReader | None) -> tuple[int | None, int]:
        """Return the bytes that all processes together may reserve, and how many of these must stay unused.

        The first is None without a limit. The second is the margin if it is less than an allocator segment, else 0.
        """
        capacity = None if reader is None else reader.stats().capacity
        if capacity is None:
            return None, 0
        margin = capacity - self._most_of(capacity)
        return (capacity - margin, 0) if margin >= SEGMENT_BYTES else (capacity, margin)

    def _most_of(self, capacity: int) -> int:
        if isinstance(self.margin, str):
            return capacity - parse_size(self.margin)
        if not isinstance(self.margin, int | float) or not 0 <= self.margin < 1:
            raise ValueError(f"margin={self.margin!r} must be a share in [0, 1), or a size such as '1GiB'.")
        return int(capacity * (1 - self.margin))
