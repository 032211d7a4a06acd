"""The settings of the caching allocator, as PYTORCH_ALLOC_CONF gives them (c10/core/AllocatorConfig.cpp)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_memtools.memory.allocator.block_rounding import LARGE_SEGMENT, ROUNDUP_INTERVALS, WHOLE_SEGMENT_FROM
from lightning_memtools.memory.sizes import MIB, format_size


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings of the allocator that change how memory is allocated. Sizes are in bytes, the defaults are torch's.

    Attributes:
        expandable_segments: Whether to grow one virtual address range per stream instead of using separate segments.
        max_split_size: Blocks of at least this size are never split; None for no limit.
        max_non_split_rounding: A request of at least ``max_split_size`` takes a cached block only if the block exceeds
            the request by less than this size. None means ``large_segment_size``.
        roundup_power2_divisions: The number of equal steps into which the range between two powers of two is divided;
            sizes are rounded up to the next step. Each entry is for one interval of sizes (see
            `block_rounding.roundup_divisions_of`). 0 or 1 means no such rounding, as does an empty tuple.
        per_process_memory_fraction: The fraction of the device's memory that the allocator may reserve.
        large_segment_size: The size of the segments that serve requests between 1 and 10 MiB.

    Raises:
        ValueError: ``max_split_size`` or ``max_non_split_rounding`` is less than ``large_segment_size``.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int | None = None
    roundup_power2_divisions: tuple[int, ...] = ()
    per_process_memory_fraction: float = 1.0
    large_segment_size: int = LARGE_SEGMENT

    def __post_init__(self) -> None:
        for size in (self.max_split_size, self.max_non_split_rounding):
            if size is not None and size < self.large_segment_size:
                raise ValueError(f"it must be at least a large segment, {format_size(self.large_segment_size)}.")

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Parse settings as in PYTORCH_ALLOC_CONF: ``"expandable_segments:True,max_split_size_mb:64"``.

        Settings of torch 2.13 that do not change where device memory goes are accepted and ignored.

        Raises:
            ValueError: A key or a value is not accepted; the message quotes it and lists the accepted keys.
            TypeError: `text` is not a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"allocator must be a text with settings, got {type(text).__name__}. {_accepted()}")
        settings: dict[str, Any] = {}
        # Commas inside brackets belong to a list: roundup_power2_divisions:[256:1,512:2].
        compact = "".join(text.split())
        pairs = re.split(r",(?![^\[]*\])", compact) if compact else []
        # The size of large segments bounds other settings, so it is read first, as in torch.
        for pair in sorted(pairs, key=lambda pair: not pair.startswith("large_segment_size_mb:")):
            key, _, value = pair.partition(":")
            if key in _IGNORED or key.startswith("pinned_") or _ONLY.get(key) == value:
                continue
            if key in _ONLY:
                raise ValueError(f"{pair!r} in {text!r} is not simulated, only {f'{key}:{_ONLY[key]}'!r} is.")
            field, read, _ = _FIELDS.get(key, ("", _unknown, str))
            try:
                settings[field] = read(value)
                cls(**settings)
            except ValueError as error:
                raise ValueError(f"Bad allocator setting {pair!r} in {text!r}: {error} {_accepted()}") from None
        return cls(**settings)

    def to_string(self) -> str:
        """Return the settings that differ from the defaults, in the form that `parse` reads."""
        values = {key: (getattr(self, field), write) for key, (field, _, write) in _FIELDS.items()}
        default = AllocatorConfig()
        return ",".join(
            f"{key}:{write(value)}"
            for key, (value, write) in values.items()
            if value != getattr(default, _FIELDS[key][0])
        )


def _unknown(_value: str) -> Any:
    raise ValueError("the setting is not known, or no key:value pair.")


def _bool(value: str) -> bool:
    if value not in {"True", "False"}:
        raise ValueError("it must be True or False.")
    return value == "True"


def _whole_number(value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"{value!r} is not a whole number.")
    return int(value)


def _mebibytes(value: str) -> int:
    return _whole_number(value) * MIB


def _large_segment(value: str) -> int:
    size = _mebibytes(value)
    if size <= WHOLE_SEGMENT_FROM:
        raise ValueError("it must be more than 10 MiB.")
    return size


def _share(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number.") from None
    if not 0 <= share <= 1:
        raise ValueError("it must be between 0 and 1.")
    return share


def _power_of_two(value: str) -> int:
    number = _whole_number(value)
    if number == 0 or number & (number - 1):
        raise ValueError(f"{value!r} is not a power of two.")
    return number


def _divisions(value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_power_of_two(value),) * ROUNDUP_INTERVALS
    if not value.endswith("]"):
        raise ValueError("the list has no closing bracket.")
    filled = [0] * ROUNDUP_INTERVALS
    last: int | None = None
    for entry in value[1:-1].split(","):
        interval, colon, steps = entry.partition(":")
        if not colon:
            raise ValueError(f"{entry!r} is not size_in_mb:divisions.")
        divisions = 0 if steps == "0" else _power_of_two(steps)
        if interval == ">":
            start = 0 if last is None else last + 1
            filled[start:] = [divisions] * (ROUNDUP_INTERVALS - start)
            continue
        index = min(_power_of_two(interval).bit_length() - 1, ROUNDUP_INTERVALS - 1)
        # The first entry holds for all smaller sizes too; every other one for its own interval alone.
        start = 0 if last is None else index
        filled[start : index + 1] = [divisions] * (index + 1 - start)
        last = index
    return tuple(filled)


def _in_mebibytes(size: int) -> int:
    return size // MIB


def _listed(divisions: tuple[int, ...]) -> str:
    return f"[{','.join(f'{2**index}:{steps}' for index, steps in enumerate(divisions))}]"


# The field of each setting, and how it is read and written.
_FIELDS: dict[str, tuple[str, Callable[[str], Any], Callable[[Any], Any]]] = {
    "expandable_segments": ("expandable_segments", _bool, str),
    "max_split_size_mb": ("max_split_size", _mebibytes, _in_mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes, _in_mebibytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions, _listed),
    "per_process_memory_fraction": ("per_process_memory_fraction", _share, str),
    "large_segment_size_mb": ("large_segment_size", _large_segment, _in_mebibytes),
}
# torch reads these too, and settings of pinned memory. Garbage collection acts only below a memory fraction of 1.
_IGNORED = {
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
}
# Settings of which only one value is simulated.
_ONLY = {"backend": "native", "throw_on_cudamalloc_oom": "False"}


def _accepted() -> str:
    return f"Accepted are {', '.join(_FIELDS)}; accepted without effect pinned_*, {', '.join(sorted(_IGNORED))}."
