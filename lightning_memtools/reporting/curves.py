"""Curves of means: values are taken in at every step, and a point is written now and then."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_memtools.memory.arriving_values import ArrivingValues
from lightning_memtools.reporting.loggers import log_scalars
from lightning_memtools.reporting.losses import tags_of
from lightning_memtools.reporting.means import RunningMeans
from lightning_memtools.reporting.ranks import RankGather


class Curves:
    """One or several curves under one tag: `<tag>` for a single one, `<tag>/<name>` for several.

    Args:
        tag: Where they are logged.
        names: Their names; None takes whatever comes. What comes later than the first point is then a curve of its own,
            but with several ranks it is left out, because all ranks must agree on what they reduce.
    """

    def __init__(self, tag: str, names: Sequence[str] | None) -> None:
        self.tag = tag
        self.names = names
        self._means = RunningMeans()
        self._arriving: ArrivingValues[Callable[[Any], None]] = ArrivingValues()
        self._gather: RankGather | None = None
        self._tag_of: dict[str, str] = {}
        self._ever_seen: set[str] = set()
        self._warned = False

    @property
    def has_curves(self) -> bool:
        """Whether a point was sent on its way since the beginning."""
        return bool(self._tag_of)

    def begin(self, gather: RankGather) -> None:
        """Forget a former run."""
        self._means.clear()
        self._arriving.clear()
        self._gather = gather
        self._tag_of = {}
        if self.names is not None:
            self.expect(self.names)

    def expect(self, names: Sequence[str]) -> None:
        """Say which names the curves have."""
        self.names = names
        self._tag_of = tags_of(self.tag, names)

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Take in one value; nothing waits for the device."""
        self._ever_seen.add(name)
        self._means.add(name, value, weight)

    def drop(self, name: str) -> None:
        """Forget a name's values since the last point."""
        self._means.drop(name)

    def without_values(self) -> list[str]:
        """The asked-for names that have no value since the last point."""
        return [name for name in self.names or () if name not in self._means]

    def log(self, trainer: Trainer, step: int) -> None:
        """Send a point on its way. Collective with several ranks."""
        gather = self._gather
        assert gather is not None
        if not self._tag_of:
            self._tag_of = tags_of(self.tag, gather.union(self._means.names))
        elif self.names is None and gather.world_size == 1:
            self._tag_of |= {name: f"{self.tag}/{name}" for name in self._means.names if name not in self._tag_of}
        if not self._tag_of:
            return
        tags = list(self._tag_of.values())

        def write(means_and_weights: list[list[float]]) -> None:
            means, weights = means_and_weights
            known = {tag: mean for tag, mean, weight in zip(tags, means, weights, strict=True) if weight > 0}
            log_scalars(trainer, known, step)

        self._arriving.send(self._means.take(list(self._tag_of), trainer.strategy.root_device), write)
        self.poll()

    def poll(self) -> None:
        """Write the points that have reached the host, without waiting."""
        self._write_points(wait=False)

    def drain(self) -> None:
        """Wait for the points that are on their way and write them."""
        self._write_points(wait=True)

    def _write_points(self, *, wait: bool) -> None:
        for means_and_weights, write in self._arriving.receive(wait=wait):
            write(means_and_weights)

    def clear(self) -> None:
        """Drop what is not logged yet."""
        self._means.clear()
        self._arriving.clear()

    def warn_of_missing(self, argument: str, existing: Iterable[str]) -> None:
        """Warn, once, of asked-for names that never had a value, and list what exists."""
        missing = [name for name in self.names or () if name not in self._ever_seen]
        if missing and not self._warned:
            self._warned = True
            listed = ", ".join(repr(name) for name in sorted(set(existing))) or "no scalar at all"
            warnings.warn(
                f"LossCurves({argument}={missing[0]!r}): no such loss was returned or logged, so it has no curve. "
                f"There is: {listed}.",
                stacklevel=2,
            )
