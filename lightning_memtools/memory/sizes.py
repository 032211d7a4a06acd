"""Sizes with units: "24GiB" is 24 * 2**30 bytes, "512MB" is 512 * 10**6 bytes."""

from __future__ import annotations

import re

KIB = 2**10
MIB = 2**20
GIB = 2**30

# IEC 80000-13: binary prefixes are powers of 1024, SI prefixes powers of 1000.
_BYTES_PER_UNIT = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Turn a size such as ``"24GiB"``, ``"512 MB"`` or ``"1.5GiB"`` into bytes, rounded to the nearest byte.

    Raises:
        ValueError: The text has no unit or an unknown one: a bare number never means bytes.
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _BYTES_PER_UNIT:
        raise ValueError(
            f"Not a size: {text!r}. Write a number with one of the units B, KB, MB, GB, TB (powers of 1000) "
            'or KiB, MiB, GiB, TiB (powers of 1024), such as "24GiB" or "512MB".'
        )
    return round(float(match[1]) * _BYTES_PER_UNIT[unit])


def format_size(n_bytes: int) -> str:
    """Print bytes in the largest binary unit that gives at least 1, with three significant digits: ``"1.50 GiB"``."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1023.5 would print as "1024 MiB"; the next unit says "1.00 GiB".
        if abs(size) < 1023.5:  # noqa: PLR2004
            return f"{n_bytes} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def to_gib(n_bytes: int) -> float:
    """Bytes as GiB (2**30), the unit of every size in the logs."""
    return n_bytes / GIB


def _three_digits(size: float) -> str:
    # Thresholds leave room for rounding: 99.96 prints as "100", not "100.0".
    magnitude = abs(size)
    decimals = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0  # noqa: PLR2004
    return f"{size:.{decimals}f}"
