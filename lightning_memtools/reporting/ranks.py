"""Gathers numbers and Python objects from all ranks over gloo, without waiting for any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

T = TypeVar("T")


class RankGather:
    """Gathers small values of the host from all ranks over gloo, so that no GPU stream is waited for.

    Ranks do wait for each other's host code. Make it, and call its methods, on every rank or on none.

    Args:
        timeout: How long a rank waits for the others. A rank that does not answer in time is given up, and every method
            returns this rank's own values from then on. With None, a rank that does not answer raises torch's error
            after the time limit of the training's process group.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.rank, self.world_size = 0, 1
        self._gives_up = timeout is not None
        self._is_connected = False
        self._own_group: distributed.ProcessGroup | None = None
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self._is_connected = self.world_size > 1
        # NCCL gathers device tensors only, and reading them would wait for the device. A timeout needs its own group.
        if self._is_connected and (timeout is not None or distributed.get_backend() != "gloo"):
            self._own_group = distributed.new_group(backend="gloo", timeout=timeout)

    def numbers(self, mine: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, in the order of ranks; all ranks must give equally many."""
        # float64 holds byte counts exactly up to 2**53.
        sent = torch.tensor(mine, dtype=torch.float64)
        received = [torch.empty_like(sent) for _ in range(self.world_size)]
        if not self._answered(lambda: distributed.all_gather(received, sent, group=self._own_group)):
            return [list(mine)]
        return [theirs.tolist() for theirs in received]

    def objects(self, mine: T) -> list[T]:
        """Return every rank's object, in the order of ranks; a rank that gave None is left out."""
        received: list[T | None] = [None] * self.world_size
        if not self._answered(lambda: distributed.all_gather_object(received, mine, group=self._own_group)):
            return [mine]
        return [theirs for theirs in received if theirs is not None]

    def union(self, names: list[str]) -> list[str]:
        """Return every name that any rank has, each once, in the order of ranks."""
        return list(dict.fromkeys(name for theirs in self.objects(names) for name in theirs))

    def close(self) -> None:
        """Release the group; every method then returns this rank's own values. Closing twice does no harm."""
        if self._own_group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._own_group)
        self._own_group = None
        self._is_connected = False

    def _answered(self, collective: Callable[[], object]) -> bool:
        if not self._is_connected:
            return False
        try:
            collective()
        except RuntimeError:  # what gloo raises for a timeout and for a rank that died
            if not self._gives_up:
                raise
            # A group that lost a rank gives no more answers: do not wait for them again.
            self.close()
            return False
        return True
