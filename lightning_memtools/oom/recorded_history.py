"""The recorded history of the allocator, replayed with expandable segments.

If the replay serves the failed request, memory was there, and only lay in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory, replay
from lightning_memtools.memory.allocator.memory_snapshot import FailedRequest, begin_of, failed_request, trace_until
from lightning_memtools.memory.sizes import format_size


@dataclass(frozen=True)
class RecordedHistory:
    """The recorded history of an allocator up to the failed request, and the size of its device.

    Attributes:
        snapshot: A snapshot as `torch.cuda.memory._snapshot` or `take_snapshot` returns it.
        config: The allocator's settings.
        capacity: The capacity of the device in bytes.
        used_by_others: Bytes held outside of the allocator.
        device: The device's index in the snapshot.
    """

    snapshot: Mapping[str, Any]
    config: AllocatorConfig
    capacity: int
    used_by_others: int
    device: int = 0

    @property
    def _limits(self) -> dict[str, int]:
        return {"capacity": self.capacity, "used_by_others": self.used_by_others, "device": self.device}

    @cached_property
    def failed(self) -> FailedRequest | None:
        """The request that ran out of memory; None if the recorded history does not contain it."""
        return failed_request(self.snapshot, self.config, **self._limits)

    def allocator_at(self, time: int) -> CachingAllocator | None:
        """Replay the history up to `time`, and return the simulated allocator; None if the replay is impossible."""
        begin = begin_of(self.snapshot, self.device)
        if begin is None or begin > time:
            return None
        done = replay(trace_until(self.snapshot, self.config, **self._limits, until=time))
        return done.allocator if done.completed else None

    def with_expandable_segments(self) -> tuple[bool | None, str]:
        """Return whether ``expandable_segments:True`` would have avoided the failure, and a sentence that says why.

        The first value is None if the recorded history is not enough to tell.
        """
        failed = self.failed
        if failed is None:
            return None, "the recorded history does not hold the failed request"
        if _served(failed, self.config)[0]:
            # Where a history is cut off, its oldest blocks are placed by guess, which may be better than they were.
            what = "is not reproduced by" if failed.is_complete else "fails in memory that is older than"
            return None, f"the failed request {what} the recorded history"
        return _served(failed, replace(self.config, expandable_segments=True))


def _served(failed: FailedRequest, config: AllocatorConfig) -> tuple[bool, str]:
    """Return whether the failed request would have succeeded with the settings `config`, and why, in a sentence."""
    done = replay(failed.trace, config=config)
    if done.out_of_memory is not None:
        return False, "memory would have run out even earlier"
    try:
        done.allocator.malloc(failed.n_bytes, stream=failed.stream)
    except SimulatedOutOfMemory as error:
        free = format_size(max(error.free or 0, 0))
        return False, f"only {free} would have been free, and {format_size(error.rounded)} takes pages of 2 or 20 MiB"
    return True, "the request would have been served"
