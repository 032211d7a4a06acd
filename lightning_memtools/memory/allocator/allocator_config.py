"""The settings of the caching allocator, as PYTORCH_ALLOC_CONF gives them (c10/core/AllocatorConfig.cpp)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_memtools.memory.allocator.block_rounding import LARGE_SEGMENT, ROUNDUP_INTERVALS, WHOLE_SEGMENT_FROM
from lightning_memtools.memory.sizes import MIB, format_size

# CUDAAllocatorConfig::pinned_max_register_threads
_MOST_REGISTER_THREADS = 128


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings of the allocator that change how memory is allocated; sizes in bytes. The defaults are torch's.

    Attributes:
        expandable_segments: Grow one virtual range per stream and pool, instead of asking for separate segments.
        max_split_size: Blocks of at least this size are never split; None for no limit.
        max_non_split_rounding: A request of at least ``max_split_size`` takes a cached block that is less than this
            much too large. None for ``large_segment_size``.
        roundup_power2_divisions: The number of steps into which the range between two powers of two is divided for
            rounding: one entry per interval of sizes (`block_rounding.roundup_divisions_of`), 0 or 1 for none. Empty
            for no rounding.
        garbage_collection_threshold: The share of the allowed memory above which old cached segments are released;
            0 for never. Without effect unless ``per_process_memory_fraction`` is below 1.
        per_process_memory_fraction: The share of the device that the allocator may reserve.
        large_segment_size: The size of the segments that serve requests between 1 and 10 MiB.

    Raises:
        ValueError: A value is out of its range.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int | None = None
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    large_segment_size: int = LARGE_SEGMENT

    def __post_init__(self) -> None:
        if self.large_segment_size <= WHOLE_SEGMENT_FROM:
            raise ValueError(
                f"large_segment_size must be more than 10 MiB, not {format_size(self.large_segment_size)}."
            )
        for name in ("max_split_size", "max_non_split_rounding"):
            size = getattr(self, name)
            if size is not None and size < self.large_segment_size:
                raise ValueError(
                    f"{name} must be at least the large segment size, {format_size(self.large_segment_size)}, "
                    f"not {format_size(size)}."
                )
        divisions = self.roundup_power2_divisions
        if divisions and len(divisions) != ROUNDUP_INTERVALS:
            raise ValueError(f"roundup_power2_divisions needs {ROUNDUP_INTERVALS} entries, not {len(divisions)}.")
        for entry in divisions:
            if entry < 0 or entry & (entry - 1):
                raise ValueError(f"roundup_power2_divisions must be powers of two, or 0 for none, not {entry}.")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ValueError(
                f"garbage_collection_threshold must be between 0 and 1, not {self.garbage_collection_threshold}."
            )
        if not 0 <= self.per_process_memory_fraction <= 1:
            raise ValueError(
                f"per_process_memory_fraction must be between 0 and 1, not {self.per_process_memory_fraction}."
            )

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Parse settings as in PYTORCH_ALLOC_CONF: ``"expandable_segments:True,max_split_size_mb:64"``.

        Settings that torch 2.13 knows but that do not change where device memory goes are checked, and then ignored.

        Raises:
            ValueError: A key or a value is not accepted; the message quotes it and lists the accepted keys.
        """
        if not isinstance(text, str):
            raise TypeError(f"allocator must be a text with settings, got {type(text).__name__}. {_accepted()}")
        settings: dict[str, Any] = {}
        for key, value in _pairs(text):
            if _ONLY.get(key) == value:
                continue
            if key in _ONLY:
                raise ValueError(
                    f"{f'{key}:{value}'!r} in {text!r} is not simulated, only {f'{key}:{_ONLY[key]}'!r} is."
                )
            if key not in _FIELDS and key not in _WITHOUT_EFFECT:
                raise ValueError(f"Unknown allocator setting {key!r} in {text!r}. {_accepted()}")
            try:
                if key in _WITHOUT_EFFECT:
                    _WITHOUT_EFFECT[key](value)
                    continue
                field, read = _FIELDS[key]
                settings[field] = read(value)
                cls(**settings)
            except ValueError as error:
                raise ValueError(
                    f"Bad allocator setting {f'{key}:{value}'!r} in {text!r}: {error} {_accepted()}"
                ) from None
        return cls(**settings)

    def to_string(self) -> str:
        """Return the settings that differ from the defaults, in the form that `parse` reads."""
        pairs: list[str] = []
        if self.expandable_segments:
            pairs.append("expandable_segments:True")
        if self.large_segment_size != LARGE_SEGMENT:
            pairs.append(f"large_segment_size_mb:{self.large_segment_size // MIB}")
        if self.max_split_size is not None:
            pairs.append(f"max_split_size_mb:{self.max_split_size // MIB}")
        if self.max_non_split_rounding is not None:
            pairs.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding // MIB}")
        if self.roundup_power2_divisions:
            entries = (f"{2**index}:{divisions}" for index, divisions in enumerate(self.roundup_power2_divisions))
            pairs.append(f"roundup_power2_divisions:[{','.join(entries)}]")
        if self.garbage_collection_threshold:
            pairs.append(f"garbage_collection_threshold:{self.garbage_collection_threshold}")
        if self.per_process_memory_fraction != 1:
            pairs.append(f"per_process_memory_fraction:{self.per_process_memory_fraction}")
        return ",".join(pairs)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    pairs = []
    # Commas inside brackets belong to a list: roundup_power2_divisions:[256:1,512:2].
    compact = "".join(text.split())
    for part in re.split(r",(?![^\[]*\])", compact) if compact else ():
        key, _, value = part.partition(":")
        if not (key and value):
            raise ValueError(
                f"Bad allocator setting {part!r} in {text!r}: write key:value pairs with commas between them, "
                f"such as 'expandable_segments:True,max_split_size_mb:64'. {_accepted()}"
            )
        pairs.append((key, value))
    # It bounds other settings, so it is read first, as in torch.
    yield from sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb")


def _bool(value: str) -> bool:
    if value not in {"True", "False"}:
        raise ValueError("it must be True or False.")
    return value == "True"


def _whole_number(value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"{value!r} is not a whole number.")
    return int(value)


def _positive(value: str) -> int:
    number = _whole_number(value)
    if number == 0:
        raise ValueError("it must be greater than 0.")
    return number


def _register_threads(value: str) -> int:
    number = _power_of_two(value)
    if number > _MOST_REGISTER_THREADS:
        raise ValueError(f"it must be at most {_MOST_REGISTER_THREADS}.")
    return number


def _mebibytes(value: str) -> int:
    return _whole_number(value) * MIB


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number.") from None


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


def _power_of_two(value: str) -> int:
    number = _whole_number(value)
    if number == 0 or number & (number - 1):
        raise ValueError(f"{value!r} is not a power of two.")
    return number


_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", _bool),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _number),
    "per_process_memory_fraction": ("per_process_memory_fraction", _number),
    "large_segment_size_mb": ("large_segment_size", _mebibytes),
}
# Read, so that a value that torch refuses is refused here too, and then ignored.
_WITHOUT_EFFECT: dict[str, Callable[[str], Any]] = {
    "release_lock_on_cudamalloc": _bool,
    "release_lock_on_hipmalloc": _bool,
    "pinned_use_cuda_host_register": _bool,
    "pinned_use_hip_host_register": _bool,
    "pinned_num_register_threads": _register_threads,
    "pinned_use_background_threads": _bool,
    "pinned_reserve_segment_size_mb": _positive,
    "pinned_free_catch_all": _bool,
    "pinned_max_round_threshold_mb": _whole_number,
    "pinned_max_cached_size_mb": _whole_number,
    "graph_capture_record_stream_reuse": _bool,
}
# Settings of which only one value is simulated.
_ONLY = {"backend": "native", "throw_on_cudamalloc_oom": "False"}


def _accepted() -> str:
    return f"Accepted are {', '.join(_FIELDS)}; accepted without effect {', '.join(sorted(_WITHOUT_EFFECT))}."
