"""Values of all ranks: posted in the process group's store and read later, or exchanged in lockstep."""

from __future__ import annotations

import os
import pickle
import platform
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
from torch import distributed

from lightning_memtools._torch import default_process_group_store, replaced_collectives
from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.warning_categories import DegradedWarning

T = TypeVar("T")

PATIENCE_S = 5.0
"""Seconds that rank 0 waits, at the end of a call of the Trainer, for values of ranks that have not ended theirs."""

# The points of a rank that stay in the store. Ranks that train together are at most one logged step apart.
_KEPT = 16

_LONGEST_PAUSE_S = 0.05
_LATEST = "latest"
_PROCESS = "lightning_memtools/process of rank {}"


def with_store(use: Callable[[Any], T]) -> T | None:
    """Call `use` with the process group's key-value store, and return the result; None if no store can be reached."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    try:
        return use(default_process_group_store())
    except Exception:  # noqa: BLE001, the rank that holds it may be the one that died
        return None


def _stored(key: str) -> bytes | None:
    """Return the value of a key in the store, without waiting; b"" if the key is missing, None without a store."""
    return with_store(lambda store: store.get(key) if store.check([key]) else b"")


def _rank_and_world_size() -> tuple[int, int]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _key_of(name: str, rank: int) -> str | None:
    """Return a new store key; None without a store. The n-th call with a name returns the same key on all ranks."""
    with_store(lambda store: store.set(_PROCESS.format(rank), f"{platform.node()} {os.getpid()}"))
    n = with_store(lambda store: store.add(f"lightning_memtools/{name}/made by rank {rank}", 1))
    return None if n is None else f"lightning_memtools/{name}/{n}"


def has_died(rank: int) -> bool:
    """Return True if a rank's process on this machine was killed, so that it could not say that it ends."""
    node, _, pid = (_stored(_PROCESS.format(rank)) or b"").decode().rpartition(" ")
    return node == platform.node() and not psutil.pid_exists(int(pid))


@dataclass(frozen=True, slots=True)
class PostedByRank:
    """The values that one rank has posted for other ranks, by label, and whether that rank has finished posting."""

    values: Mapping[str, Any]
    has_ended: bool = False


class RankPosts:
    """Exchanges the latest values of all ranks through the process group's key-value store, without waiting.

    Each rank calls `add` with its values for one point of a curve. Rank 0 writes the point once the values of all ranks
    have arrived. The values of a rank that is late, ends early or fails are left out, with one warning.

    For each name, every rank has to create the same number of instances.

    Args:
        name: The name of the callback that the values belong to, used in the store's keys and in the warning.
    """

    def __init__(self, name: str) -> None:
        self.rank, self.world_size = _rank_and_world_size()
        self._name = name
        self._values: dict[str, Any] = {}
        self._has_ended = False
        self._waiting: deque[tuple[str, Any, Callable[[list[Any]], None]]] = deque()
        self._is_first_warning = FirstTime()
        self._key = _key_of(name, self.rank) if self.world_size > 1 else None
        if self._key is None:  # no store: this rank is on its own
            self.rank, self.world_size = 0, 1

    def post(self, values: Mapping[str, Any]) -> None:
        """Post values, by label, for other ranks to read. Only the 16 latest labels are kept."""
        for label, value in values.items():
            self._values.pop(label, None)
            self._values[label] = value
        while len(self._values) > _KEPT:
            del self._values[next(iter(self._values))]
        if self._key is not None:
            posted = pickle.dumps(PostedByRank(self._values, self._has_ended))
            with_store(lambda store: store.set(f"{self._key}/{self.rank}", posted))

    def end(self, values: Mapping[str, Any] | None = None) -> None:
        """Post the last values, and tell the other ranks that no more will come."""
        self._has_ended = True
        self.post(values or {})

    def read(self) -> list[PostedByRank]:
        """Return what each rank has posted, in the order of ranks."""
        return [self._read(rank) for rank in range(self.world_size)]

    def _read(self, rank: int) -> PostedByRank:
        if rank == self.rank:
            return PostedByRank(self._values, self._has_ended)
        written = _stored(f"{self._key}/{rank}")
        if written is None:  # the process that holds the store is gone: nothing more will come
            return PostedByRank({}, has_ended=True)
        posted: PostedByRank = pickle.loads(written) if written else PostedByRank({})  # noqa: S301, of our other ranks
        return posted

    def add(self, label: str, mine: Any, write: Callable[[list[Any]], None], latest: Any = None) -> None:
        """Post this rank's part of a point of a curve. On rank 0, also write the points that are now complete.

        Args:
            label: The name of the point; the same on every rank.
            mine: This rank's part, such as its values at this step.
            write: Called on rank 0 with the parts in the order of ranks; None for a part that has not arrived.
            latest: This rank's latest value, which `finish` collects.
        """
        if self.world_size == 1:
            write([mine])
            return
        self.post({label: mine, _LATEST: latest})
        if self.rank == 0:
            self._waiting.append((label, mine, write))
            self.write_arrived()

    def write_arrived(self) -> None:
        """Write all complete points. If more than 8 points are waiting, write the oldest even if it is incomplete."""
        while self._waiting:
            posted = self.read()
            is_complete = all(self._waiting[0][0] in theirs.values or theirs.has_ended for theirs in posted)
            if not is_complete and len(self._waiting) <= _KEPT // 2:
                return
            self._write_first(posted)

    def finish(self, *, patience_s: float = PATIENCE_S, latest: Any = None) -> list[Any]:
        """End the run. Rank 0 waits up to `patience_s` for the other ranks to end, then writes all remaining points.

        Rank 0 does not wait if no points remain and `latest` is None.

        Returns:
            On rank 0, the `latest` values of all ranks, in the order of ranks; None for a value that has not arrived.
            On any other rank, a list that contains only its own `latest`.
        """
        self.end({} if latest is None else {_LATEST: latest})
        if self.rank > 0 or self.world_size == 1:
            return [latest]
        end = time.monotonic() + (patience_s if self._waiting or latest is not None else 0.0)
        while time.monotonic() < end:
            if all(theirs.has_ended or has_died(rank) for rank, theirs in enumerate(self.read())):
                break
            time.sleep(0.005)
        posted = self.read()
        while self._waiting:
            self._write_first(posted)
        missing = [rank for rank, theirs in enumerate(posted) if not theirs.has_ended]
        if missing and patience_s > 0 and latest is not None:
            self._warn(missing, "the end of the run")
        return [theirs.values.get(_LATEST) for theirs in posted]

    def _write_first(self, posted: Sequence[PostedByRank]) -> None:
        label, mine, write = self._waiting.popleft()
        parts = [theirs.values.get(label) for theirs in posted]
        parts[self.rank] = mine
        missing = [rank for rank, part in enumerate(parts) if part is None]
        if missing:
            self._warn(missing, label)
        write(parts)

    def _warn(self, missing: Sequence[int], label: str) -> None:
        if not self._is_first_warning():
            return
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        warnings.warn(
            f"{self._name}: the values of {ranks} for {label} have not arrived, so what is logged there is that of the "
            "other ranks alone. Such a rank has fewer batches, has ended, or is slow; training does not wait for it. "
            "This warning is given once.",
            DegradedWarning,
            stacklevel=2,
        )


EXCHANGE_LIMIT = timedelta(seconds=60)
"""The time that a rank waits for others that reach the same point."""
GROUP_LIMIT = timedelta(minutes=30)
"""The time after which torch's collectives give up by default: for work whose length nobody knows."""


class RankGather:
    """Gathers small objects from all ranks through the host, without the GPU.

    The ranks wait for each other. Create an instance, and call its methods, on every rank or on none.

    Args:
        timeout: How long a rank waits for the others. Later calls no longer wait for a rank that did not answer in
            time. If that rank answers later, it still gets the objects of the other ranks.
    """

    def __init__(self, timeout: timedelta = EXCHANGE_LIMIT) -> None:
        self.rank, self.world_size = _rank_and_world_size()
        self._timeout_s = timeout.total_seconds()
        self._posts: RankPosts | None = RankPosts("gather")
        self._n_calls = 0
        self._lost: set[int] = set()

    def objects(self, mine: Any) -> list[Any]:
        """Exchange one object per rank. Return the objects in the order of ranks, without those that are None."""
        received = {self.rank: mine} if self._posts is None else self._exchange(self._posts, mine)
        return [received[rank] for rank in sorted(received) if received[rank] is not None]

    def close(self) -> None:
        """Leave the exchange: other ranks stop waiting, and `objects` returns only this rank's object. Idempotent."""
        if self._posts is not None:
            self._posts.end()
        self._posts = None

    def _exchange(self, posts: RankPosts, mine: Any) -> dict[int, Any]:
        """Exchange one object per rank through `posts`. Return the objects that arrived in time, as a dict by rank."""
        if posts.world_size == 1:
            return {self.rank: mine}
        label, self._n_calls = str(self._n_calls), self._n_calls + 1
        posts.post({label: mine})
        end, pause_s = time.monotonic() + self._timeout_s, 0.0005
        while True:
            posted = dict(enumerate(posts.read()))
            received = {rank: theirs.values[label] for rank, theirs in posted.items() if label in theirs.values}
            self._lost -= received.keys()
            silent = posted.keys() - received.keys() - self._lost
            late = {rank for rank in silent if not posted[rank].has_ended and not has_died(rank)}
            if not late or time.monotonic() > end:
                self._lost |= late
                return received
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


@contextmanager
def refused_collectives(error: Callable[[str], Exception]) -> Iterator[None]:
    """Context manager: with several ranks, calling any collective raises `error(<the collective's name>)`."""
    if _rank_and_world_size()[1] == 1:
        yield
        return

    def refuse(name: str, _original: Any) -> Callable[..., Any]:
        def collective(*_args: Any, **_options: Any) -> Any:
            raise error(name)

        return collective

    with replaced_collectives(refuse):
        yield
