"""Sizes with units ("24GiB" is 24 * 2**30 bytes, "512MB" is 512 * 10**6), and the capacities of GPUs by name."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import TypeGuard

KIB = 2**10
MIB = 2**20
GIB = 2**30

# It varies from 300 to 700 MB by device and loading.
_CUDA_CONTEXT_BYTES = 500 * MIB

# IEC 80000-13: binary prefixes are powers of 1024, SI prefixes powers of 1000.
_BYTES_PER_UNIT: dict[str, int] = {f"{prefix}b": 1000**power for power, prefix in enumerate(("", *"kmgt"))}
_BYTES_PER_UNIT |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_LETTERS = {"K", "M", "G", "T"}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)

# For GPUs whose driver's figure is not known. Of the known figures, the smallest share of the marketing size is 0.977
# without error correction in the memory itself, and 0.911 with it: tests/memory/test_sizes.py keeps the estimates
# below them all.
_USABLE_SHARE = 0.95
_USABLE_SHARE_WITH_INLINE_ECC = 0.91

_MAKERS = re.compile(r"nvidia|geforce|tesla|[\s_\-]+", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Turn a size such as ``"24GiB"``, ``"512 MB"`` or ``"1.5GiB"`` into bytes, rounded to the nearest byte.

    The number 0 is accepted too: it is the same size in any unit.

    Raises:
        ValueError: The text has no unit or an unknown one, or is a number other than 0.
    """
    if text == 0 and isinstance(text, int) and not isinstance(text, bool):
        return 0
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    unit = match[2].lower() if match else ""
    if match is None or unit not in _BYTES_PER_UNIT:
        raise ValueError(
            f"Not a size: {text!r}.{_suggested_units(text)} Write a number with one of the units B, KB, MB, GB, TB "
            '(powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), such as "24GiB" or "512MB".'
        )
    return round(float(match[1]) * _BYTES_PER_UNIT[unit])


def is_count(value: object, *, least: int = 1) -> TypeGuard[int]:
    """Return True for an int that is at least `least`; a bool is not a count."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _suggested_units(text: object) -> str:
    """Return a "Did you mean ...?" question for a size with no unit ("24") or a shortened one ("1G"); otherwise ""."""
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    letter = match[2].upper() if match else ""
    if match and not letter and float(match[1]) < 1000:  # noqa: PLR2004, "4090" is a GPU
        letter = "G"
    if match is None or letter not in _LETTERS:
        return ""
    return f" Did you mean '{match[1]}{letter}iB' or '{match[1]}{letter}B'?"


def format_size(n_bytes: int | None) -> str:
    """Format a number of bytes in the largest fitting binary unit, with three significant digits: ``"1.50 GiB"``.

    For None, return "not known".
    """
    if n_bytes is None:
        return "not known"
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1023.5 would print as "1024 MiB"; the next unit says "1.00 GiB".
        if abs(size) < 1023.5:  # noqa: PLR2004
            return f"{n_bytes} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def format_share(n_bytes: int | None, whole: int | None) -> str:
    """Format `n_bytes` as a percentage of `whole`, such as "12.5%"; "" if one of them is None, or `whole` is 0."""
    return "" if n_bytes is None or not whole else f"{100 * n_bytes / whole:.1f}%"


def to_gib(n_bytes: int) -> float:
    """Convert bytes to GiB (2**30 bytes), the unit of every size in the logs."""
    return n_bytes / GIB


def _three_digits(size: float) -> str:
    # Thresholds leave room for rounding: 99.96 prints as "100", not "100.0".
    magnitude = abs(size)
    decimals = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0  # noqa: PLR2004
    return f"{size:.{decimals}f}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model that is listed in the data file ``gpus.json``, which names the source of each number.

    Attributes:
        name: The name of the model with its memory size, such as "H100 80GB".
        usable_bytes: The most memory that a process can use: the total that the driver reports.
        estimated: Whether ``usable_bytes`` is estimated from the advertised size, as the driver's total is not known.
        compute_capability: The CUDA compute capability, such as "8.6".
        multiprocessors: The number of streaming multiprocessors.
    """

    name: str
    usable_bytes: int
    estimated: bool
    compute_capability: str
    multiprocessors: int

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability as (major, minor), for comparisons."""
        major, minor = map(int, self.compute_capability.split("."))
        return major, minor


@dataclass(frozen=True, slots=True)
class GpuShape:
    """The properties of a GPU that decide how much workspace kernels need; the defaults are those of an A100.

    Attributes:
        multiprocessors: The number of streaming multiprocessors.
        threads: The number of threads that each multiprocessor can hold.
        compute_capability: The compute capability as (major, minor).
    """

    multiprocessors: int = 108
    threads: int = 2048
    compute_capability: tuple[int, int] = (8, 0)

    @classmethod
    def of(cls, gpu: Gpu | None) -> GpuShape:
        """Return the `GpuShape` of a GPU; None stands for an A100.

        `threads` is the "maximum number of resident threads per SM" from the CUDA C++ programming guide.
        """
        if gpu is None:
            return cls()
        major, minor = gpu.capability
        threads = 1024 if (major, minor) == (7, 5) else 1536 if (major, minor) > (8, 0) and major in {8, 12} else 2048
        return cls(gpu.multiprocessors, threads, (major, minor))


def parse_capacity(text: str | int) -> int:
    """Turn a size such as ``"24GiB"`` or a GPU's name such as ``"RTX 4090"`` or ``"H100 80GB"`` into bytes.

    An int is taken as the capacity in bytes. It has to be at least 1 MiB, because a smaller number is probably meant
    in another unit.

    A GPU's capacity is the total that its driver reports to a process, which is less than the advertised size. If that
    total is not known, 95% of the advertised size in GiB is assumed, or 91% where error correction takes memory.

    Raises:
        ValueError: `text` is neither a size nor a known GPU, is below 1 MiB, or names a GPU sold with several sizes.
    """
    if not isinstance(text, str):
        return _capacity_in_bytes(text)
    gpu = find_gpu(text)
    if gpu is not None:
        return gpu.usable_bytes
    try:
        size = parse_size(text)
    except ValueError:
        # A size with half a unit ("1G") resembles the names of GPUs.
        nearest = _suggested_units(text) or _suggestion(text)
        raise ValueError(
            f'Not a capacity: {text!r}.{nearest} Give a size with a unit, such as "24GiB" (24 x 2^30 bytes) or "24GB" '
            '(24 x 10^9 bytes), or the name of a GPU, such as "RTX 4090".'
        ) from None
    if size <= 0:
        raise ValueError(f"Not a capacity: {text!r}. A device has more than zero bytes.")
    return size


def _capacity_in_bytes(number: object) -> int:
    if not is_count(number, least=MIB):
        nearest = _suggested_units(str(number)) if is_count(number) else ""
        raise ValueError(
            f'Not a capacity: {number!r}.{nearest} Give a size with a unit such as "24GiB", a GPU\'s name such as '
            '"RTX 4090", or a whole number of bytes, at least 1048576 (1 MiB).'
        )
    return number


def find_gpu(text: object) -> Gpu | None:
    """Return the GPU with this name; None if no known GPU has this name.

    Case, spaces, hyphens and the words NVIDIA, GeForce and Tesla make no difference. The memory size may be left out
    if the GPU is sold with only one size.

    Raises:
        ValueError: The GPU is sold with different memory sizes, and the text gives none.
    """
    matches = _gpus().get(_key(text), []) if isinstance(text, str) else []
    if len(matches) > 1:
        names = " or ".join(repr(gpu.name) for gpu in matches)
        raise ValueError(f"{text!r} comes with different sizes: write {names}.")
    return matches[0] if matches else None


def context_bytes(capacity: object) -> int:
    """Return the bytes to assume for the CUDA context: 500 MiB if `capacity` is the name of a GPU, 0 if it is a size.

    Raises:
        ValueError: The GPU is sold with different memory sizes, and the text gives none.
    """
    return 0 if find_gpu(capacity) is None else _CUDA_CONTEXT_BYTES


def known_gpus() -> list[Gpu]:
    """Return every GPU that is listed in ``gpus.json``."""
    return list(dict.fromkeys(gpu for gpus in _gpus().values() for gpu in gpus))


@cache
def _gpus() -> dict[str, list[Gpu]]:
    content = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))
    by_name: dict[str, list[Gpu]] = {}
    for row in content["gpus"]:
        usable = row["usable_bytes"]
        if usable is None:
            share = _USABLE_SHARE_WITH_INLINE_ECC if row.get("inline_ecc") else _USABLE_SHARE
            # Vendors write GB, but a "24GB" card has 24 * 2**30 bytes of memory chips.
            estimate = int(float(row["marketing"].removesuffix("GB")) * GIB * share)
        gpu = Gpu(
            name=f"{row['name']} {row['marketing']}",
            usable_bytes=estimate if usable is None else usable,
            estimated=usable is None,
            compute_capability=row["compute_capability"],
            multiprocessors=row["multiprocessors"],
        )
        for name in (row["name"], gpu.name):
            by_name.setdefault(_key(name), []).append(gpu)
    return by_name


def _key(name: str) -> str:
    return _MAKERS.sub("", name).lower()


def _suggestion(text: str) -> str:
    names = {_key(gpu.name): gpu.name for gpu in known_gpus()}
    # difflib underrates "4090" in "rtx409024gb", so names that contain the text come first.
    key = _key(text)
    contained = [name for other, name in names.items() if key and key in other]
    near = [names[other] for other in difflib.get_close_matches(key, names, n=3)]
    suggestions = list(dict.fromkeys([*contained, *near]))[:3]
    return f" Did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else ""
