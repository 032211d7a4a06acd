"""Limits of the batch size: those that do not depend on the device's memory, with reasons, and the margin."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from lightning_memtools._torch import AnyBatchNorm
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
    """

    max_val: int | None = None
    multiple_of: int = 1
    per_rank: int | None = None
    n_samples: int | None = None
    min_batches: float = 1.0
    drop_last: bool = False
    avoid_single: bool = False

    def round_down(self, size: float) -> int:
        """Return the largest admitted size at or below `size`; 0 if there is none.

        Without any limit, infinity gives 2^62.
        """
        highest = min(size, self.max_val or math.inf, self._most_by_data, self.per_rank or math.inf)
        candidate = 2**62 if math.isinf(highest) else max(int(highest), 0)
        candidate -= candidate % self.multiple_of
        while candidate > 0 and (self._splits_unevenly(candidate) or self._leaves_single_sample(candidate)):
            candidate -= self.multiple_of
        return candidate

    def smallest(self) -> int:
        """Return the smallest admitted size.

        Raises:
            ValueError: No size is admitted.
        """
        for candidate in range(self.multiple_of, self.round_down(math.inf) + 1, self.multiple_of):
            if self.round_down(candidate) == candidate:
                return candidate
        raise ValueError(
            f"No batch size is possible: {self.n_samples} samples per rank, multiple_of={self.multiple_of}, "
            f"max_val={self.max_val}, effective batch size per rank {self.per_rank}. Relax one of them."
        )

    def reasons_against(self, size: int) -> list[str]:
        """Return why a size is not admitted, in words for a report. `max_val` and `multiple_of` are not listed."""
        reasons = {
            "a last batch of one sample in front of BatchNorm": self._leaves_single_sample(size),
            "the effective batch size": self._splits_unevenly(size),
            "the number of samples": size > self._most_by_data,
        }
        return [reason for reason, holds in reasons.items() if holds]

    @property
    def _most_by_data(self) -> float:
        return math.inf if self.n_samples is None else self.n_samples / self.min_batches

    def _splits_unevenly(self, size: int) -> bool:
        return self.per_rank is not None and self.per_rank % size != 0

    def _leaves_single_sample(self, size: int) -> bool:
        if not self.avoid_single:
            return False
        has_last_batch = self.n_samples is not None and not self.drop_last
        return size == 1 or (has_last_batch and (self.n_samples or 0) % size == 1)


def checked_margin(margin: float | str) -> float | int:
    """Return the share of the capacity (a float), or the bytes (an int), that have to stay free.

    Raises:
        ValueError: A share outside [0, 1), or a text that is not a size.
    """
    if isinstance(margin, str):
        return parse_size(margin)
    if not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise ValueError(f"margin={margin!r} must be a share in [0, 1), or a size such as '1GiB'.")
    return float(margin)


def samples_per_rank(effective_batch_size: int, n_ranks: int) -> int:
    """Return the samples per optimizer step of each rank.

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
    """Return True if training may raise on a batch of one sample: a BatchNorm takes its statistics from it."""
    return any(isinstance(module, AnyBatchNorm) and module.training for module in model.modules())
