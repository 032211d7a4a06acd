"""Curves of means: each step adds values, which stay on the device; every few steps their mean is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_memtools.memory.arriving_values import ArrivingValues
from lightning_memtools.reporting.loggers import log_scalars
from lightning_memtools.reporting.loss_names import tags_of
from lightning_memtools.reporting.ranks import PATIENCE_S, RankPosts


class MeanCurves:
    """Logs curves of values such as losses. Each point is a weighted mean over several steps and all ranks.

    Values are added by name, and each name gets a curve. A single curve is tagged `<tag>`, several `<tag>/<name>`.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        # Of the values since the last point, by name.
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}
        # The sums of each point, with its Trainer, its weights and its step.
        self._arriving: ArrivingValues[tuple[Trainer, Mapping[str, float], int]] = ArrivingValues()
        self._posts: RankPosts | None = None
        self._tag_of: dict[str, str] = {}

    def begin(self) -> None:
        """Start a new run, and drop all values of an earlier run. Call this on every rank."""
        self.clear()
        self._posts = RankPosts(f"LossCurves ({self.tag})")
        self._tag_of = {}

    @property
    def has_values(self) -> bool:
        """True if values were added since the last call of `log`."""
        return bool(self._sums)

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Add a value with a weight to the next point of the curve `name`, without waiting for the device."""
        value = value.detach().reshape(()) if value.dim() else value.detach()
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(value, dtype=torch.float32)
        self._sums[name].add_(value, alpha=weight)
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def clear(self) -> None:
        """Drop all values that have not been logged yet."""
        self._sums, self._weights = {}, {}
        self._arriving.clear()

    def log(self, trainer: Trainer, step: int) -> None:
        """Log the means of the values added since the last call. A point is written once all ranks have sent values."""
        device = trainer.strategy.root_device
        values = [value.to(device) for value in self._sums.values()]
        sums: Tensor | list[float] = torch.stack(values) if values else []
        self._arriving.send(sums, (trainer, self._weights, step))
        self._sums, self._weights = {}, {}
        self.write_arrived()

    def write_arrived(self, *, wait: bool = False) -> None:
        """Write the points whose values have been copied to the host. With `wait`, wait until all have been copied."""
        if self._posts is None:
            return
        for sums, (trainer, weights, step) in self._arriving.receive(wait=wait):
            mine = {name: [total, weight] for total, (name, weight) in zip(sums, weights.items(), strict=True)}
            self._posts.add(f"step {step}", mine, partial(self._write, trainer, step))
        self._posts.write_arrived()

    def finish(self, *, patience_s: float = PATIENCE_S) -> None:
        """End the run, and drop values still on the device. Rank 0 waits up to `patience_s` for the other ranks."""
        self.clear()
        posts, self._posts = self._posts, None
        if posts is not None:
            posts.finish(patience_s=patience_s)

    def _write(self, trainer: Trainer, step: int, parts: Sequence[Mapping[str, Sequence[float]] | None]) -> None:
        """Log the weighted means over all ranks. `parts` has one dict per rank, from each name to (sum, weight)."""
        known = [part for part in parts if part is not None]
        names = list(dict.fromkeys(name for part in known for name in part))
        self._tag_of = self._tag_of or tags_of(self.tag, names)
        scalars: dict[str, float] = {}
        for name in names:
            total, weight = map(sum, zip(*(part[name] for part in known if name in part), strict=True))
            scalars[self._tag_of.setdefault(name, f"{self.tag}/{name}")] = total / weight
        log_scalars(trainer, scalars, step)
