"""The arguments of BatchSizeTuner, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from lightning_memtools.batch_size.resized_loaders import WorstCase
from lightning_memtools.batch_size.size_limits import checked_margin
from lightning_memtools.memory.peaks import STAGES, Stage
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.stats import MemoryReader

_CHOICES = {
    "keep": ("learning_rate", "effective"),
    "on_failure": ("raise", "warn"),
    "objective": ("memory", "throughput"),
}


@dataclass(slots=True, kw_only=True)
class TunerSettings:
    """The arguments of BatchSizeTuner; its docstring describes each.

    Raises:
        ValueError: An argument is out of its range.
    """

    batch_arg_name: str | Sequence[str]
    margin: float | str
    init_val: int | None
    max_val: int | None
    multiple_of: int
    effective_batch_size: int | None
    stages: Sequence[str]
    max_trials: int
    at_epochs: Sequence[int]
    precision: float
    max_time: float | None
    keep: str
    objective: str
    on_failure: str
    worst_case: WorstCase | None = None

    def __post_init__(self) -> None:
        for name in ("init_val", "max_val", "multiple_of", "effective_batch_size", "max_trials"):
            value = getattr(self, name)
            if value is not None and not is_count(value):
                fault = "below 1" if isinstance(value, int) else "no whole number"
                raise ValueError(f"{name}={value!r} is {fault}. Give a whole number from 1 on.")
        if self.max_val is not None and self.max_val < self.multiple_of:
            raise ValueError(f"max_val={self.max_val} is below multiple_of={self.multiple_of}. Raise max_val.")
        if not _several(self.stages) or not self.stages or not all(stage in STAGES for stage in self.stages):
            raise ValueError(f"stages={self.stages!r} must be a sequence of some of {', '.join(STAGES)}.")
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise ValueError(f"batch_arg_name={self.batch_arg_name!r} names no attribute. Give a name, or several.")
        if not _several(self.at_epochs) or not all(is_count(epoch, least=0) for epoch in self.at_epochs):
            raise ValueError(f"at_epochs={self.at_epochs!r} must be whole numbers from 0 on, such as [5, 10].")
        self._check_ends()
        checked_margin(self.margin)

    def _check_ends(self) -> None:
        if not 0 < self.precision < 1:
            raise ValueError(f"precision={self.precision!r} must be a share between 0 and 1.")
        if self.max_time is not None and self.max_time <= 0:
            raise ValueError(f"max_time={self.max_time!r} must be a number of seconds above 0.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}.")
        if self.keep == "effective" and self.effective_batch_size is not None:
            raise ValueError('Give either keep="effective" or effective_batch_size.')

    @property
    def names(self) -> list[str]:
        """The attributes that hold a batch size."""
        return list(self.batch_arg_name) if _several(self.batch_arg_name) else [self.batch_arg_name]  # type: ignore[list-item]

    @property
    def stages_in_fit(self) -> list[Stage]:
        """The stages that are tuned in a fit, training first."""
        return [stage for stage in STAGES if stage in self.stages and stage in {"train", "val"}]

    def limit(self, reader: MemoryReader | None) -> int | None:
        """Return the most bytes of the device that all processes may use; None where its capacity is not known."""
        capacity = None if reader is None else reader.stats().capacity
        if capacity is None:
            return None
        margin = checked_margin(self.margin)
        return capacity - margin if isinstance(margin, int) else int(capacity * (1 - margin))


def _several(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
