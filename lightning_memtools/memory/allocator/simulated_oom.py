"""The error that the simulated allocator raises when memory runs out."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memtools.memory.sizes import format_size


@dataclass(eq=False)
class SimulatedOutOfMemory(Exception):  # noqa: N818, named for what happened, as torch.OutOfMemoryError is
    """Raised when the simulated device has no room for another segment after the allocator released all it could.

    Attributes (all sizes in bytes, at the moment of raising):
        requested: The size that the caller requested.
        rounded: The size of the block for that request.
        segment_size: The size that was requested from the device: the number in CUDA's "Tried to allocate".
        capacity: The total memory of the device; None when only a memory fraction limits it.
        free: The free memory of the device.
        used_by_others: The memory held by other processes, and by this process outside the allocator.
        allocated: The memory held by tensors.
        reserved: The memory held in segments, used or not.
        allowed: The most that ``per_process_memory_fraction`` lets the allocator reserve; None without such a limit.
    """

    requested: int
    rounded: int
    segment_size: int
    capacity: int | None
    free: int | None
    used_by_others: int
    allocated: int
    reserved: int
    allowed: int | None

    def __str__(self) -> str:
        total = "unlimited" if self.capacity is None else format_size(self.capacity)
        return (
            f"Simulated device out of memory: {format_size(self.requested)} needs a segment of "
            f"{format_size(self.segment_size)}, and of the capacity of {total} {format_size(max(self.free or 0, 0))} "
            f"are free ({format_size(self.reserved)} reserved, {format_size(self.allocated)} of them allocated; "
            f"{format_size(self.used_by_others)} used by others)."
        )
