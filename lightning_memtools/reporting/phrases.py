"""Parts of sentences that several reports need."""

from __future__ import annotations

from collections.abc import Sequence


def counted(n: int, one: str, several: str) -> str:
    """Return a number with its noun in the singular or plural, such as "1 step" or "3 steps"."""
    return f"{n:,} {one if n == 1 else several}"


def in_series(parts: Sequence[str]) -> str:
    """Join the parts into one phrase, such as "a", "a and b" or "a, b and c"."""
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)


def first_of(found: Sequence[object], most: int = 3) -> str:
    """Join the first `most` items into a phrase that also counts the remaining ones: "a, b, c and 4 more"."""
    shown = ", ".join(map(str, found[:most]))
    return shown if len(found) <= most else f"{shown} and {len(found) - most:,} more"
