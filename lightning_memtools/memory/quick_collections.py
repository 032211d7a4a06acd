"""Keeps Python's garbage collector from looking through all objects of a program again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Within, garbage collection takes milliseconds, since it skips the objects that exist already.

    A full collection over the objects of torch and Lightning takes a quarter of a second, and what makes many objects
    at once, such as a traced step, causes one every few steps. Reference cycles that exist already are collected
    afterwards. Where the caller has frozen objects before, these stay frozen.
    """
    # Python counts frozen objects one by one: within another block that takes as long as a collection, and is known.
    if _Frozen.here or gc.get_freeze_count():
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
    """Says where a block above has frozen what was there."""

    here = False
