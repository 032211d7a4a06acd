"""The options of checkpoint planning, and their validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_memtools.memory.sizes import is_count, parse_size
from lightning_memtools.simulation.tracer import StepCost

BnDropout = Literal["skip", "recompute"]
LossHead = Literal["auto", "keep"]


class CheckpointOptionsError(ValueError):
    """Raised if the options do not suit the model. As a class of its own, it is told from ValueErrors of the user."""


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """The options of `plan_checkpoints`; `parse` creates them from that function's arguments.

    Attributes:
        segments: The number of chunks that each Sequential is cut into; None to choose freely what to recompute.
        budget_share: The limit on activation memory, as a fraction of its size without a plan; None for no limit.
        budget_bytes: The highest allowed peak of memory, in bytes; None for no limit.
        bn_dropout: "skip" to never recompute BatchNorm and Dropout layers of a Sequential, or "recompute" to allow it.
        include: Name patterns of the modules that may be recomputed; None for all modules.
        exclude: Name patterns of modules that are never recomputed.
        loss_head: "auto" to compute the loss of a language model in chunks if that saves memory, or "keep".
    """

    segments: int | None
    budget_share: float | None
    budget_bytes: int | None
    bn_dropout: BnDropout
    include: tuple[str, ...] | None
    exclude: tuple[str, ...]
    loss_head: LossHead = "auto"

    @staticmethod
    def parse(  # noqa: PLR0917, in the order of `plan_checkpoints`
        segments: int | Literal["auto"] = "auto",
        memory_budget: float | str | None = None,
        bn_dropout: BnDropout = "skip",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        loss_head: LossHead = "auto",
    ) -> CheckpointOptions:
        """Check the arguments of `plan_checkpoints`, and return them as options.

        Raises:
            ValueError: A value is not accepted. The message names it and the accepted values.
        """
        if bn_dropout not in get_args(BnDropout):
            raise ValueError(f'bn_dropout={bn_dropout!r} is neither "skip" nor "recompute".')
        if loss_head not in get_args(LossHead):
            raise ValueError(f'loss_head={loss_head!r} is neither "auto" nor "keep".')
        if segments != "auto" and not is_count(segments):
            raise ValueError(f'segments={segments!r} is not a number of chunks: give an int of at least 1, or "auto".')
        if segments != "auto" and memory_budget is not None:
            raise ValueError(
                f"segments={segments!r} and memory_budget={memory_budget!r} contradict each other: a fixed number of "
                'chunks leaves nothing to fit. Give one of them, and leave segments at "auto" for a budget.'
            )
        return CheckpointOptions(
            segments=None if segments == "auto" else segments,
            budget_share=_share(memory_budget) if isinstance(memory_budget, float) else None,
            budget_bytes=None if memory_budget is None or isinstance(memory_budget, float) else _size(memory_budget),
            bn_dropout=bn_dropout,
            include=None if include is None else _patterns("include", include),
            exclude=_patterns("exclude", exclude),
            loss_head=loss_head,
        )

    def limit(self, plain: StepCost) -> int | None:
        """Return the highest allowed peak in bytes; None without a budget. `plain` is the cost without a plan."""
        if self.budget_share is not None:
            return plain.static_bytes + int(self.budget_share * plain.activation_bytes)
        return self.budget_bytes

    def fits(self, plain: StepCost) -> bool:
        """Return True if `plain`, the cost of the step without recomputation, is within the budget."""
        limit = self.limit(plain)
        return limit is not None and plain.peak_bytes <= limit


def _share(budget: float) -> float:
    if not 0 < budget <= 1:
        raise ValueError(f"memory_budget={budget!r} is not a share. {_BUDGETS}")
    return budget


def _size(budget: object) -> int:
    if not isinstance(budget, str):
        raise ValueError(  # noqa: TRY004, one type of error for all options
            f"memory_budget={budget!r} could be a share or bytes: a bare {type(budget).__name__} never means either. "
            f"{_BUDGETS}"
        )
    try:
        size = parse_size(budget)
    except ValueError as error:
        raise ValueError(f"memory_budget={budget!r}: {error}") from None
    if size == 0:
        raise ValueError(f"memory_budget={budget!r} leaves no memory at all. {_BUDGETS}")
    return size


def _patterns(name: str, patterns: object) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise ValueError(f"{name}={patterns!r} is one string: give a list of patterns, as {name}=[{patterns!r}].")  # noqa: TRY004, as above
    if not isinstance(patterns, Sequence) or not all(isinstance(each, str) and each for each in patterns):
        raise ValueError(f"{name}={patterns!r} is not a list of patterns of module names, such as ['blocks.*'].")
    return tuple(patterns)


_BUDGETS = (
    "Give a share of the activation memory as a float above 0 and up to 1.0, such as 0.5, or a peak as a size, "
    'such as "8GiB".'
)
