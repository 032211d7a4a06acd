"""Keeps training's own outcome what it is, whatever goes wrong in the work of a callback that only watches it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def unless_it_fails(work: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Return the result of `work`; if it raises, that of `otherwise`, which gets the error as text.

    Put one around each piece of work between two exchanges of ranks, so that a rank that fails still takes part.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001, the purpose of this function
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001, an error of the user's whose text cannot be made
            text = type(error).__name__
        return otherwise(text)


def warn_of(what: str) -> Callable[[str], None]:
    """Return an `otherwise` that warns: "HaltOnNaN could not read the step: ValueError: ... Training goes on."."""

    def warn(error: str) -> None:
        warnings.warn(f"{what}: {error}. Training goes on.", stacklevel=3)

    return warn
