from __future__ import annotations

import gc

import pytest

from lightning_memtools.memory.gc_frozen import gc_frozen


class Ring:
    def __init__(self) -> None:
        self.itself = self


def _is_looked_at(thing: object) -> bool:
    """Garbage collection looks at this object: it is not frozen."""
    return any(each is thing for each in gc.get_objects())


@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_caller_froze_stays_frozen(frozen):
    older = Ring()
    if frozen:
        gc.freeze()
    try:
        with gc_frozen(), gc_frozen():
            assert not _is_looked_at(older)
        assert _is_looked_at(older) is not frozen
    finally:
        gc.unfreeze()
    assert _is_looked_at(older)
