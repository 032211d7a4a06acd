"""The settings of the caching allocator, as PYTORCH_ALLOC_CONF gives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_memtools.memory.allocator.rounding import LARGE_SEGMENT, ROUNDUP_INTERVALS
from lightning_memtools.memory.sizes import MIB


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings of the allocator that change where memory goes; sizes in bytes. The defaults are torch's.

    Attributes:
        expandable_segments: Grow one virtual range per stream and pool, instead of asking for separate segments.
        max_split_size: Blocks of at least this size are never split; None for no limit.
        max_non_split_rounding: A request of at least ``max_split_size`` takes a block less than this much too large.
        roundup_power2_divisions: Steps between powers of two that requests are rounded to, one entry per interval of
            sizes (see `rounding.roundup_divisions_of`); empty for none.
        garbage_collection_threshold: The share of the allowed memory above which old cached segments are given back;
            0 for never. Without effect unless ``per_process_memory_fraction`` is set.
        per_process_memory_fraction: The share of the device that the allocator may reserve; None for no limit.
        large_segment_size: What is asked of the device for requests between 1 and 10 MiB.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float | None = None
    large_segment_size: int = LARGE_SEGMENT

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Read a string such as ``"expandable_segments:True,max_split_size_mb:64"``, as in PYTORCH_ALLOC_CONF.

        Raises:
            ValueError: A key or a value is not accepted; the message quotes it and lists what is.
        """
        settings: dict[str, Any] = {}
        for key, value in _pairs(text):
            if key in _WITHOUT_EFFECT:
                continue
            if key not in _FIELDS:
                raise ValueError(f"Unknown allocator setting {key!r} in {text!r}. Accepted are {_accepted()}.")
            field, read = _FIELDS[key]
            try:
                settings[field] = read(value)
            except ValueError as error:
                raise ValueError(f"Bad value {value!r} for {key} in {text!r}: {error}.") from None
        return cls(**settings)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    # Commas inside brackets belong to a list: roundup_power2_divisions:[256:1,512:2].
    compact = "".join(text.split())
    for part in re.split(r",(?![^\[]*\])", compact) if compact else ():
        key, colon, value = part.partition(":")
        if not (key and colon and value):
            raise ValueError(
                f"Bad allocator setting {part!r} in {text!r}: write key:value pairs separated by commas, "
                f"such as 'expandable_segments:True'. Accepted keys are {_accepted()}."
            )
        yield key, value


def _bool(value: str) -> bool:
    if value not in {"True", "False"}:
        raise ValueError("it must be True or False")
    return value == "True"


def _mebibytes_above(least: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not (value.isascii() and value.isdigit() and int(value) > least):
            raise ValueError(f"it must be a whole number of MiB larger than {least}")
        return int(value) * MIB

    return read


def _share(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise ValueError("it must be a number between 0 and 1")
    return share


def _fraction(value: str) -> float:
    return 1.0 if value in {"1", "1.0"} else _share(value)


def _divisions(value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_power_of_two(value),) * ROUNDUP_INTERVALS
    if not value.endswith("]"):
        raise ValueError("the list has no closing bracket")
    filled = [0] * ROUNDUP_INTERVALS
    position = 0
    for entry in value[1:-1].split(","):
        limit, colon, divisions = entry.partition(":")
        if not colon:
            raise ValueError(f"{entry!r} is not size_mb:divisions")
        count = _power_of_two(divisions)
        # Each entry covers the intervals from the previous entry's limit up to its own; ">" covers the rest.
        index = ROUNDUP_INTERVALS - 1 if limit == ">" else _power_of_two(limit).bit_length() - 1
        index = min(index, ROUNDUP_INTERVALS - 1)
        filled[position : index + 1] = [count] * max(index + 1 - position, 0)
        position = max(position, index + 1)
    return tuple(filled)


def _power_of_two(value: str) -> int:
    number = int(value) if value.isascii() and value.isdigit() else 0
    if number == 0 or number & (number - 1):
        raise ValueError(f"{value!r} is not a power of two")
    return number


_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", _bool),
    "max_split_size_mb": ("max_split_size", _mebibytes_above(20)),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes_above(20)),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
    "large_segment_size_mb": ("large_segment_size", _mebibytes_above(0)),
}
_WITHOUT_EFFECT: frozenset[str] = frozenset()


def _accepted() -> str:
    return ", ".join([*_FIELDS, *sorted(_WITHOUT_EFFECT)])
