"""The arguments of BatchSizeTuner, checked and converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from lightning_memtools.batch_size.resized_loaders import WorstCase
from lightning_memtools.batch_size.size_limits import checked_margin
from lightning_memtools.memory.peaks import STAGES, Stage
from lightning_memtools.memory.sizes import is_count


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """The arguments of BatchSizeTuner, checked; its docstring describes each.

    Attributes:
        names: Its `batch_arg_name`, as a sequence.
        margin: A share of the capacity (float), or bytes (int).
        owner: The tuner's type: its objects are not restored after trials.
        worst_case: See `worst_first`.
    """

    names: Sequence[str]
    margin: float
    init_val: int
    max_val: int | None
    multiple_of: int
    effective_batch_size: int | None
    stages: Sequence[str]
    max_trials: int
    at_epochs: Sequence[int]
    cache: str | None
    owner: type
    worst_case: WorstCase | None = None

    @classmethod
    def parse(
        cls,
        owner: type,
        *,
        batch_arg_name: str | Sequence[str],
        margin: float | str,
        init_val: int,
        max_val: int | None,
        multiple_of: int,
        effective_batch_size: int | None,
        stages: Sequence[str],
        max_trials: int,
        at_epochs: Sequence[int],
        cache: str | None,
    ) -> TunerSettings:
        """Returns the settings.

        Raises:
            ValueError: An argument is out of its range.
        """
        for name, value in (("init_val", init_val), ("max_val", max_val), ("multiple_of", multiple_of),
                            ("effective_batch_size", effective_batch_size), ("max_trials", max_trials)):  # fmt: skip
            if value is not None and not is_count(value):
                fault = "below 1" if isinstance(value, int) else "no whole number"
                raise ValueError(f"{name}={value!r} is {fault}. Give a whole number from 1 on.")
        if max_val is not None and max_val < multiple_of:
            raise ValueError(f"max_val={max_val} is below multiple_of={multiple_of}: no size is left. Raise max_val.")
        if not _several(stages) or not stages or not all(stage in STAGES for stage in stages):
            raise ValueError(f"stages={stages!r} must be a sequence of some of {', '.join(STAGES)}.")
        names: list[Any] = list(batch_arg_name) if _several(batch_arg_name) else [batch_arg_name]
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"batch_arg_name={batch_arg_name!r} names no attribute. Give a name, or several.")
        if not _several(at_epochs) or not all(is_count(epoch, least=0) for epoch in at_epochs):
            raise ValueError(f"at_epochs={at_epochs!r} lists no epochs. Give whole numbers from 0 on, such as [5, 10].")
        return cls(
            names=names,
            margin=checked_margin(margin), init_val=init_val, max_val=max_val, multiple_of=multiple_of,
            effective_batch_size=effective_batch_size, stages=stages, max_trials=max_trials, at_epochs=at_epochs,
            cache=cache, owner=owner,
        )  # fmt: skip

    @property
    def stages_in_fit(self) -> list[Stage]:
        """Those of the stages that a fit runs."""
        return [stage for stage in STAGES if stage in self.stages and stage in {"train", "val"}]


def _several(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
