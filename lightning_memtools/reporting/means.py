"""Means of device scalars over many steps, kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torchmetrics import SumMetric


class RunningMeans:
    """The weighted mean of each named scalar since it was last taken. Nothing here waits for the device."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}
        self._weights: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> list[str]:
        """What has values, in the order in which it was first added."""
        return list(self._values)

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Take in one scalar; 512 bytes of the device are kept for each until the mean is taken."""
        # A copy: the tensor may be written again (in place, or as a CUDA graph's output), or keep a larger one alive.
        value = value.detach()
        self._values.setdefault(name, []).append(value.clone() if weight == 1.0 else value * weight)
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def drop(self, name: str) -> None:
        """Forget one name."""
        self._values.pop(name, None)
        self._weights.pop(name, None)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self._weights.clear()

    def take(self, names: Sequence[str], device: torch.device) -> Tensor:
        """The means since the last call and their weights, over all ranks; begins anew.

        Collective when torch.distributed is initialised: every rank must ask for as many names, in the same order.

        Args:
            names: Which means, at least one. A name that no rank has values of has the mean NaN and the weight 0.
            device: The device of this rank's values.

        Returns:
            float32 of shape (2, number of names) on the device: means, then weights.
        """
        sums = torch.stack([self._sum(name, device) for name in names])
        # `full` for each and not one `tensor`: a list has to be copied to the device, and that waits for it.
        weights = torch.stack([torch.full((), self._weights.get(name, 0.0), device=device) for name in names])
        self.clear()
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            packed = torch.stack([sums, weights])
            distributed.all_reduce(packed)
            sums, weights = packed
        return torch.stack([sums / weights, weights])

    def _sum(self, name: str, device: torch.device) -> Tensor:
        if name not in self._values:
            return torch.zeros((), device=device)
        # Not MeanMetric: in torchmetrics 1.9 it ignores weights with nan_strategy="disable", and any other strategy
        # waits for the device to look for NaN. A NaN loss shall show as NaN.
        metric = SumMetric(nan_strategy="disable", sync_on_compute=False)
        metric.sum_value = torch.zeros((), device=device)  # `metric.to` would copy a zero there and wait for it
        metric.update(torch.stack([value.reshape(()).to(device).float() for value in self._values[name]]))
        total: Tensor = metric.compute()
        return total
