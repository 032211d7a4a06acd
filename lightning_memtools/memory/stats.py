"""What is known of a device's memory at one moment, and who can tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """A device's memory at one moment: sizes in bytes, events as counts; None where the device cannot tell.

    The terms are those of PyTorch's caching allocator (c10/core/CachingDeviceAllocator.h).

    Attributes:
        allocated: Held by tensors, each block rounded as the allocator rounds it.
        reserved: Asked of the device and kept: segments, used or not.
        active: Allocated, and freed blocks that still wait for another stream.
        inactive_split: Free, but part of a segment that also holds used blocks: it cannot be given back.
        requested: What the tensors asked for before rounding.
        peak_allocated: The highest ``allocated`` since the last reset of the peaks.
        peak_reserved: The highest ``reserved`` since the last reset of the peaks.
        alloc_retries: How often the cache had to be emptied to serve a request.
        ooms: How many out-of-memory errors were raised.
        capacity: What the device has in all.
        device_used: What all processes together use of it.
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


class MemoryReader(Protocol):
    """A device whose memory can be read: an accelerator, the host, or a simulated device."""

    @property
    def name(self) -> str:
        """What a person calls the device, such as ``"cuda:0 (NVIDIA H200)"``."""

    @property
    def simulated(self) -> bool:
        """Whether the figures come from a simulation; wherever they are shown, that is said."""

    def stats(self) -> MemoryStats:
        """Read the statistics now, without waiting for the device."""

    def reset_peaks(self) -> None:
        """Set both peaks to the current values. Only `peaks.PeakCounter` calls this."""

    def empty_cache(self) -> None:
        """Give unused cached memory back to the device."""

    def summary(self) -> str:
        """The long table of the device's own statistics, or an empty string where it has none."""

    def composition_at_peak(self) -> Mapping[str, int] | None:
        """Bytes per category when allocated was highest since the last `reset_peaks`; None where it is not known.

        The categories are parameters, gradients, optimizer, activations, inputs and other, and add up to the peak.
        """
