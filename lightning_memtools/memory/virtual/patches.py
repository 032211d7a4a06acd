"""Functions of torch that are replaced while a device is active, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Replaced attributes, put back in the opposite order; putting back twice does no harm."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``make(original)``, which keeps the original's name and docstring."""
        original = getattr(owner, name)
        # What a class inherits is deleted afterwards, not set.
        own = vars(owner).get(name, _ABSENT)
        new = functools.wraps(original)(make(original)) if callable(original) else make(original)
        setattr(owner, name, new)
        self._done.append((owner, name, own, new))

    def undo(self) -> None:
        """Put everything back, but for what somebody else has replaced since: our function stays below theirs."""
        while self._done:
            owner, name, own, new = self._done.pop()
            if vars(owner).get(name) is not new:
                continue
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
