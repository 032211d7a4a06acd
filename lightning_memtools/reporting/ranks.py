"""A few numbers from every rank, without waiting for any device."""

from __future__ import annotations

import torch
from torch import distributed


class RankGather:
    """Gathers small vectors of host numbers from all ranks over gloo, so that no GPU stream is waited for.

    Ranks do wait for each other's host code. Make it, and call it, on every rank or on none.
    """

    def __init__(self) -> None:
        self.world_size = 1
        self._group: distributed.ProcessGroup | None = None
        if distributed.is_available() and distributed.is_initialized():
            self.world_size = distributed.get_world_size()
        if self.world_size > 1 and distributed.get_backend() != "gloo":
            # NCCL gathers device tensors only, and reading them would wait for the device.
            self._group = distributed.new_group(backend="gloo")

    def __call__(self, values: list[float]) -> list[list[float]]:
        """One list per rank, in the order of ranks; `values` must have the same length on all of them."""
        if self.world_size == 1:
            return [values]
        # float64 holds byte counts exactly up to 2**53.
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        distributed.all_gather(everyone, mine, group=self._group)
        return [theirs.tolist() for theirs in everyone]

    def union(self, names: list[str]) -> list[str]:
        """Every name that any rank has, in the order of ranks. Collective, as a call."""
        if self.world_size == 1:
            return names
        of_all: list[list[str]] = [[] for _ in range(self.world_size)]
        distributed.all_gather_object(of_all, names, group=self._group)
        return list(dict.fromkeys(name for theirs in of_all for name in theirs))
