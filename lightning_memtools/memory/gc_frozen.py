"""Keeps Python's garbage collector from visiting all objects of a program again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# Python 3.12 has a few hundred frozen objects of its own, and a caller who freezes has a hundred thousand.
_MOST_OF_PYTHON = 1000


def are_objects_frozen() -> bool:
    """Return whether the program has called `gc.freeze()`. This takes as long as a garbage collection."""
    return gc.get_freeze_count() > _MOST_OF_PYTHON


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Context manager: garbage collection skips the objects that exist already, so that it takes only milliseconds.

    With torch and Lightning imported, a full collection takes a quarter of a second. Code that creates many objects at
    once, such as a traced step, triggers one every few steps. Reference cycles among the existing objects are collected
    after the block. Objects that the caller has frozen stay frozen.
    """
    # Within another block it is known, and needs no count.
    if _Frozen.here or are_objects_frozen():
        yield
        return
    gc.freeze()
    _Frozen.here = True
    try:
        yield
    finally:
        _Frozen.here = False
        gc.unfreeze()


class _Frozen:
    """Holds the flag `here`, which is True inside a `with gc_frozen()` block."""

    here = False
