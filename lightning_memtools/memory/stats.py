"""The statistics of a device's memory at one moment, and the interface of whatever reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """A device's memory statistics at one moment. Sizes are in bytes; None stands for what the device does not report.

    The terms are those of PyTorch's caching allocator (c10/core/CachingDeviceAllocator.h).

    Attributes:
        allocated: Memory of the blocks that tensors hold, as the allocator rounds them.
        reserved: Memory of the segments that the allocator has reserved from the device, used or not.
        active: Allocated memory plus freed blocks that another stream may still use.
        inactive_split: Free memory in partly used segments. It cannot be given back to the device.
        requested: Memory that the tensors requested, before rounding.
        peak_allocated: The highest ``allocated`` since the last reset of the peaks.
        peak_reserved: The highest ``reserved`` since the last reset of the peaks.
        alloc_retries: The number of times that the cache had to be emptied to serve a request.
        ooms: The number of out-of-memory errors that were raised.
        capacity: The total memory of the device.
        device_used: The memory of the device that is in use, by all processes together.
    """

    allocated: int | None = None
    reserved: int | None = None
    active: int | None = None
    inactive_split: int | None = None
    requested: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None
    capacity: int | None = None
    device_used: int | None = None

    @property
    def used_by_others(self) -> int:
        """Bytes of the device that are held outside of this process's allocator; 0 if this is not known."""
        return max((self.device_used or 0) - (self.reserved or 0), 0)


class MemoryReader(Protocol):
    """A device whose memory can be read: an accelerator, the host, or a simulated device."""

    @property
    def name(self) -> str:
        """The name of the device for people to read, such as ``"cuda:0 (NVIDIA H200)"``."""

    @property
    def simulated(self) -> bool:
        """True if the statistics are simulated. Reports mention this."""

    def stats(self) -> MemoryStats:
        """Read the statistics now, without waiting for the device."""

    def reset_peaks(self) -> None:
        """Set the allocated and reserved peaks to the current values. Only `peaks.PeakCounter` calls this."""

    def empty_cache(self) -> None:
        """Release unused cached memory."""

    def composition_at_peak(self) -> Mapping[str, int] | None:
        """Return the bytes of each category at the peak of allocated memory since `reset_peaks`; None if not known.

        The categories are parameters, gradients, optimizer, activations, inputs and other. They add up to the peak.
        """
