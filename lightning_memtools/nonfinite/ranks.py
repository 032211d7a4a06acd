"""Talks to the other ranks, where all of them come by; a rank that stays away does not hold up the others for ever."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

from torch import distributed

T = TypeVar("T")


# All ranks trip at the same step, so an answer takes as long as the slowest rank is behind.
TIMEOUT = timedelta(seconds=60)


# One rank runs a step several times, each operation looked at, while the others wait.
PATIENCE = timedelta(minutes=10)


class Ranks:
    """Gathers Python objects from all ranks. Make it on every rank or on none.

    Args:
        timeout: How long a rank waits for the others.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        self.rank, self.world_size = 0, 1
        self._group: distributed.ProcessGroup | None = None
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        if self.world_size > 1:
            # A group of its own: gloo takes host objects whatever the training backend is, and the timeout is ours.
            self._group = distributed.new_group(backend="gloo", timeout=timeout)

    def gather(self, mine: T) -> list[T]:
        """What each rank gave, in the order of ranks; only `mine` if a rank does not answer in time."""
        if self._group is None:
            return [mine]
        everyone: list[T | None] = [None] * self.world_size
        try:
            distributed.all_gather_object(everyone, mine, group=self._group)
        except RuntimeError:  # gloo's word for a timeout or a rank that died
            self.close()  # a group that lost a rank gives no more answers; do not wait for them again
            return [mine]
        return [theirs for theirs in everyone if theirs is not None]

    def close(self) -> None:
        """Give the group back; closing twice does no harm."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None
