"""Means of device scalars over many steps, kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torchmetrics import MeanMetric


class RunningMeans:
    """The mean of each named scalar since it was last taken. Nothing here waits for the device."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[float]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Take in one scalar. It is kept by reference until the mean is taken: 512 bytes a step, and no kernel."""
        self._waiting.setdefault(name, []).append(value)
        self._weights.setdefault(name, []).append(weight)

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._weights.clear()

    def take(self, names: Sequence[str] | None = None) -> tuple[list[str], Tensor]:
        """The means since the last call, over all ranks, as one device vector; begins anew.

        Collective when torch.distributed is initialised: every rank must then ask for the same names.

        Args:
            names: Which, and in which order; None is whatever was added. A name without values has the mean NaN.

        Returns:
            The names, and a vector of as many float32 values.
        """
        asked = list(self._waiting) if names is None else list(names)
        metrics = [self._metric(name) for name in asked]
        self.clear()
        if not metrics:
            return [], torch.empty(0)
        device = next((metric.device for metric in metrics if metric.device.type != "cpu"), metrics[0].device)
        sums = torch.stack([metric.mean_value.to(device) for metric in metrics])
        weights = torch.stack([metric.weight.to(device) for metric in metrics])
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            packed = torch.stack([sums, weights])
            distributed.all_reduce(packed)
            sums, weights = packed
        return asked, sums / weights

    def _metric(self, name: str) -> MeanMetric:
        # "disable": looking for NaN would wait for the device; a NaN loss shall show as NaN.
        metric = MeanMetric(nan_strategy="disable", sync_on_compute=False)
        values = self._waiting.get(name)
        if values:
            stacked = torch.stack([value.detach().reshape(()).float() for value in values])
            metric = metric.to(stacked.device)
            weights = self._weights[name]
            metric.update(stacked, 1.0 if len(set(weights)) == 1 else torch.tensor(weights))
        return metric
