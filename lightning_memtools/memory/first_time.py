"""A warn-once flag: returns whether a call with a key is the first."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class FirstTime:
    """A callable that returns whether this is its first call with the given key."""

    said: set[object] = field(default_factory=set)

    def __call__(self, key: object = None) -> bool:
        """Return True at the first call with a key, and False at every later call with the same key."""
        is_first = key not in self.said
        self.said.add(key)
        return is_first
