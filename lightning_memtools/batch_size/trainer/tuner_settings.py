"""The arguments of BatchSizeTuner, checked and converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from lightning_memtools.batch_size.resized_loaders import WorstCase
from lightning_memtools.batch_size.size_limits import checked_margin
from lightning_memtools.memory.peaks import STAGES, Stage


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
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r} is below 1. Give a whole number from 1 on.")
        if max_val is not None and max_val < multiple_of:
            raise ValueError(f"max_val={max_val} is below multiple_of={multiple_of}: no size is left. Raise max_val.")
        unknown = sorted(set(stages) - set(get_args(Stage)))
        if unknown or not stages or isinstance(stages, str):
            raise ValueError(f"stages={stages!r} must be a sequence of some of {', '.join(STAGES)}.")
        return cls(
            names=[batch_arg_name] if isinstance(batch_arg_name, str) else list(batch_arg_name),
            margin=checked_margin(margin), init_val=init_val, max_val=max_val, multiple_of=multiple_of,
            effective_batch_size=effective_batch_size, stages=stages, max_trials=max_trials, at_epochs=at_epochs,
            cache=cache, owner=owner,
        )  # fmt: skip

    @property
    def stages_in_fit(self) -> list[Stage]:
        """Those of the stages that a fit runs."""
        return [stage for stage in STAGES if stage in self.stages and stage in {"train", "val"}]
