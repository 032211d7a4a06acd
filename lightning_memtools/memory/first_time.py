"""A warn-once flag: returns whether a call with a key is the first."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class FirstTime:
    """A callable that tells whether it is called with a key for the first time."""

    said: set[object] = field(default_factory=set)

    def __call__(self, key: object = None) -> bool:
        """Return True the first time that it is called with a key, and False from then on."""
        is_first = key not in self.said
        self.said.add(key)
        return is_first
