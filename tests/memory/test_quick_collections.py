from __future__ import annotations

import gc
import weakref

import pytest

from lightning_memtools.memory.quick_collections import quick_collections


class Ring:
    def __init__(self) -> None:
        self.itself = self


def test_what_exists_already_is_collected_afterwards_and_what_is_new_at_once():
    old = weakref.ref(Ring())
    with quick_collections():
        new = weakref.ref(Ring())
        gc.collect()
        assert (old() is None, new() is None) == (False, True)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_caller_froze_stays_frozen(frozen):
    if frozen:
        gc.freeze()
    try:
        count = gc.get_freeze_count()
        with quick_collections(), quick_collections():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()
