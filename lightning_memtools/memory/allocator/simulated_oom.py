"""The error that the simulated allocator raises when memory runs out."""

from __future__ import annotations

from lightning_memtools.memory.sizes import format_size


class SimulatedOutOfMemory(Exception):  # noqa: N818, named for what happened, as torch.OutOfMemoryError is
    """Raised where the simulated device has no room for another segment after the allocator released all it could.

    Attributes (all sizes in bytes, at the moment of raising):
        requested: The size that the caller requested.
        rounded: The size of the block for it.
        segment_size: The size that was requested from the device: the figure in CUDA's "Tried to allocate".
        capacity: The total memory of the device; None when only a memory fraction limits it.
        free: The memory that nobody uses.
        used_by_others: Held by other processes and by this one outside the allocator.
        allocated: Held by tensors.
        reserved: Held in segments, used or not.
        allowed: The most that ``per_process_memory_fraction`` lets the allocator reserve; None without such a limit.
        private_pools: The figure that CUDA's message calls "allocated in private pools". As in torch's source it is the
            free memory in these pools (of CUDA graphs and ``torch.cuda.MemPool``).
        stream: The stream that the request was for.
    """

    def __init__(
        self,
        *,
        requested: int,
        rounded: int,
        segment_size: int,
        capacity: int | None,
        free: int | None,
        used_by_others: int,
        allocated: int,
        reserved: int,
        allowed: int | None,
        private_pools: int,
        stream: int,
    ) -> None:
        self.requested = requested
        self.rounded = rounded
        self.segment_size = segment_size
        self.capacity = capacity
        self.free = free
        self.used_by_others = used_by_others
        self.allocated = allocated
        self.reserved = reserved
        self.allowed = allowed
        self.private_pools = private_pools
        self.stream = stream
        total = "unlimited" if capacity is None else format_size(capacity)
        super().__init__(
            f"Simulated device out of memory: {format_size(requested)} needs a segment of {format_size(segment_size)}, "
            f"and of the capacity of {total} {format_size(max(free or 0, 0))} are free "
            f"({format_size(reserved)} reserved, {format_size(allocated)} of them allocated; "
            f"{format_size(used_by_others)} used by others)."
        )
