"""Curves of means: each step adds values, which stay on the device, and a point is written every few steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_memtools.memory.arriving_values import ArrivingValues
from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.reporting.loggers import log_scalars
from lightning_memtools.reporting.loss_names import tags_of
from lightning_memtools.reporting.ranks import PATIENCE_S, RankPosts
from lightning_memtools.warning_categories import DegradedWarning


class MeanCurves:
    """One or several curves under one tag: `<tag>` for a single one, `<tag>/<name>` for several.

    Args:
        tag: The tag in the logs.
        names: The names of the curves. With None, every name that gets a value on any rank has a curve.
    """

    def __init__(self, tag: str, names: Sequence[str] | None) -> None:
        self.tag = tag
        self.names = names
        self._means = RunningMeans()
        # Each point with its Trainer, the names of its values, and its step.
        self._arriving: ArrivingValues[tuple[Trainer, Sequence[str], int]] = ArrivingValues()
        self._posts: RankPosts | None = None
        self._tag_of: dict[str, str] = {}
        self._ever_seen: set[str] = set()
        self._is_first_warning = FirstTime()

    @property
    def has_curves(self) -> bool:
        """True once a value has been added in this run."""
        return bool(self._ever_seen)

    def begin(self) -> None:
        """Begin a run, without any value of an earlier one. Call it on every rank."""
        self.clear()
        self._posts = RankPosts(f"LossCurves ({self.tag})")
        self._tag_of = {}
        self._ever_seen = set()
        if self.names is not None:
            self.expect(self.names)

    def expect(self, names: Sequence[str]) -> None:
        """Set the names of the curves."""
        self.names = names
        self._tag_of = tags_of(self.tag, names)

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Add one value to the next point, without waiting for the device."""
        self._ever_seen.add(name)
        self._means.add(name, value, weight)

    def replace(self, name: str, value: Tensor) -> None:
        """Put one value in the place of those of a name since the last point."""
        self._means.drop(name)
        self.add(name, value)

    def clear(self) -> None:
        """Drop all values that are not logged yet."""
        self._means.clear()
        self._arriving.clear()

    def log(self, trainer: Trainer, step: int) -> None:
        """End a point; it is written once the values of all ranks have arrived. No rank waits."""
        names = list(dict.fromkeys([*self._tag_of, *self._means.names]))
        if names:
            means_and_weights = self._means.take(names, trainer.strategy.root_device)
            self._arriving.send(means_and_weights, (trainer, names, step))
        self.write_arrived()

    def write_arrived(self, *, wait: bool = False) -> None:
        """Write the points whose values have reached the host; with `wait`, wait for all values of this rank."""
        if self._posts is None:
            return
        for (means, weights), (trainer, names, step) in self._arriving.receive(wait=wait):
            mine = {name: [mean, weight] for name, mean, weight in zip(names, means, weights, strict=True)}
            self._posts.add(f"step {step}", mine, partial(self._write, trainer, step))
        self._posts.write_arrived()

    def finish(self, *, patience_s: float = PATIENCE_S) -> None:
        """Write the points whose values are on the host, and end the run; rank 0 waits this long for other ranks."""
        self.clear()
        posts, self._posts = self._posts, None
        if posts is not None:
            posts.finish(patience_s=patience_s)

    def _write(self, trainer: Trainer, step: int, parts: Sequence[Any]) -> None:
        """Write the weighted means over the parts of all ranks."""
        known = [part for part in parts if part is not None]
        names = dict.fromkeys(name for part in known for name in part)
        if not self._tag_of:
            self._tag_of = tags_of(self.tag, names)
        elif self.names is None:
            self._tag_of |= {name: f"{self.tag}/{name}" for name in names if name not in self._tag_of}
        scalars: dict[str, float] = {}
        for name, tag in self._tag_of.items():
            weighted = [part[name] for part in known if name in part and part[name][1] > 0]
            if weighted:
                total = sum(weight for _, weight in weighted)
                scalars[tag] = sum(mean * (weight / total) for mean, weight in weighted)
        log_scalars(trainer, scalars, step)

    def warn_of_missing(self, argument: str, existing: Iterable[str]) -> None:
        """Warn, once, of a name that was asked for and never had a value, and list the names that exist."""
        missing = [name for name in self.names or () if name not in self._ever_seen]
        if missing and self._is_first_warning():
            listed = ", ".join(repr(name) for name in sorted(set(existing))) or "no scalar at all"
            warnings.warn(
                f"LossCurves({argument}={missing[0]!r}): no such loss was returned or logged, so it has no curve. "
                f"There is: {listed}.",
                DegradedWarning,
                stacklevel=2,
            )


class RunningMeans:
    """The weighted mean of each named scalar since it was last taken. Nothing here waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        """The names that have values, in the order in which they were first added."""
        return list(self._sums)

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Add one scalar."""
        # A product is a copy: the tensor may be written again (in place, or as a CUDA graph's output).
        weighted = value.detach().reshape(()).float() * weight
        self._sums[name] = self._sums[name] + weighted if name in self._sums else weighted
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def drop(self, name: str) -> None:
        """Drop the values of one name."""
        self._sums.pop(name, None)
        self._weights.pop(name, None)

    def clear(self) -> None:
        """Drop all values."""
        self._sums.clear()
        self._weights.clear()

    def take(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Return this rank's means since the last call and their weights, and drop the values.

        Args:
            names: The names of the means, at least one. Where there is no value, the mean is NaN and the weight 0.
            device: The device of this rank's values.

        Returns:
            float32 of shape (2, number of names) on the device: means, then weights.
        """
        nothing = torch.zeros((), device=device)
        sums = torch.stack([self._sums.get(name, nothing).to(device) for name in names])
        # `full` for each and not one `tensor`: a list has to be copied to the device, and that waits for it.
        weights = torch.stack([torch.full((), self._weights.get(name, 0.0), device=device) for name in names])
        self.clear()
        return torch.stack([sums / weights, weights])
