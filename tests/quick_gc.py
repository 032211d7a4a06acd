"""Makes passes over all Python objects quick in tests, by hiding those that were there before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_memtools.memory.quick_collections import quick_collections


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Python's garbage collector, and what asks it, sees only objects that are made within."""
    gc.collect()
    with quick_collections():
        yield
