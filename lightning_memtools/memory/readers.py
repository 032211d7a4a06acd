"""Readers of real accelerators (CUDA and ROCm, MPS, and all that torch.accelerator supports) and of host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import psutil
import torch

from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.memory.virtual import VirtualDevice


def reader_for(device: torch.device) -> MemoryReader | None:
    """Return the reader of a device's memory: an active VirtualDevice (simulation), or else the accelerator's reader.

    Returns None for the plain CPU, and for devices that keep no statistics.
    """
    virtual = VirtualDevice.current()
    if virtual is not None and device.type == "cpu":
        return virtual
    return accelerator_reader(device)


def accelerator_reader(device: torch.device) -> MemoryReader | None:
    """Return the reader of an accelerator's memory, the same for every call; None if it keeps no statistics."""
    is_current = torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device(
        device.type
    )
    # A device without an index is the current one, which has one reader under both names: a second would reset peaks.
    if device.index is None and is_current:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return _reader_of(device, is_current)


@functools.cache
def _reader_of(device: torch.device, is_current: bool) -> MemoryReader | None:
    reader: MemoryReader
    if device.type == "cuda":
        reader = CudaReader(device)
    elif device.type == "mps":
        reader = MpsReader()
    elif is_current and hasattr(torch.accelerator, "memory_stats"):  # since torch 2.9
        reader = AcceleratorReader(device)
    else:
        return None
    try:
        known = reader.stats().allocated is not None
    except (RuntimeError, NotImplementedError):  # raised by backends without an allocator of their own
        return None
    return reader if known else None


class AcceleratorReader:
    """Reads the memory statistics of any accelerator through `torch.accelerator`."""

    simulated = False

    def __init__(self, device: torch.device) -> None:
        self.index = device.index or 0
        self.name = f"{device.type}:{self.index}"

    def stats(self) -> MemoryStats:
        """Read the statistics of the accelerator, without waiting for it."""
        flat = torch.accelerator.memory_stats(self.index)
        free, total = _free_and_total(self.index)
        counts = flat.get("num_alloc_retries"), flat.get("num_ooms")
        return _stats_of(lambda name, kind: flat.get(f"{name}.all.{kind}"), counts, total, free)

    def reset_peaks(self) -> None:
        """Set the peaks of allocated and reserved memory to the current values."""
        torch.accelerator.reset_peak_memory_stats(self.index)

    def empty_cache(self) -> None:
        """Release unused cached memory."""
        torch.accelerator.empty_cache()

    def composition_at_peak(self) -> Mapping[str, int] | None:
        """Return None: a real device does not know which category its memory belongs to."""
        return None


class CudaReader(AcceleratorReader):
    """Reads the memory statistics of CUDA (or ROCm) without torch's slow flattening and sorting of the result."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.name = f"cuda:{self.index} ({torch.cuda.get_device_name(self.index)})"

    def stats(self) -> MemoryStats:
        """Read the statistics of the accelerator, without waiting for it."""
        free, total = torch.cuda.mem_get_info(self.index)
        nested = torch.cuda.memory_stats_as_nested_dict(self.index)
        if not nested:  # before the first use
            return _stats_of(lambda *_: 0, (0, 0), total, free)
        counts = nested["num_alloc_retries"], nested["num_ooms"]
        return _stats_of(lambda name, kind: nested[name]["all"][kind], counts, total, free)

    def reset_peaks(self) -> None:
        """Set the peaks of allocated and reserved memory to the current values."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def empty_cache(self) -> None:
        """Release unused cached memory."""
        torch.cuda.empty_cache()


class MpsReader:
    """Reads the memory of Apple's Metal device (MPS), which keeps no peaks and does not count retries or errors."""

    simulated = False
    name = "mps"

    def stats(self) -> MemoryStats:
        """Read the allocated and reserved memory that Metal reports, and its recommended maximum as the capacity."""
        driver = torch.mps.driver_allocated_memory()
        return MemoryStats(
            allocated=torch.mps.current_allocated_memory(),
            reserved=driver,
            capacity=torch.mps.recommended_max_memory(),
        )

    def reset_peaks(self) -> None:
        """Do nothing: Metal keeps no peaks."""

    def empty_cache(self) -> None:
        """Release unused cached memory."""
        torch.mps.empty_cache()

    def composition_at_peak(self) -> Mapping[str, int] | None:
        """Return None: a real device does not know which category its memory belongs to."""
        return None


def allocated_and_reserved(reader: MemoryReader) -> tuple[int, int]:
    """Return only the allocated and the reserved bytes. On CUDA this is faster than `stats`, which calls the driver."""
    if isinstance(reader, CudaReader):
        nested = torch.cuda.memory_stats_as_nested_dict(reader.index)
        if not nested:  # before the first use
            return 0, 0
        return nested["allocated_bytes"]["all"]["current"], nested["reserved_bytes"]["all"]["current"]
    stats = reader.stats()
    return stats.allocated or 0, stats.reserved or 0


def _stats_of(
    value: Callable[[str, str], int | None],
    counts: tuple[int | None, int | None],
    capacity: int | None,
    free: int | None,
) -> MemoryStats:
    """Build a `MemoryStats`. `value` looks up ("reserved_bytes", "peak") etc.; `counts` are retries and OOM errors."""
    return MemoryStats(
        allocated=value("allocated_bytes", "current"),
        reserved=value("reserved_bytes", "current"),
        active=value("active_bytes", "current"),
        inactive_split=value("inactive_split_bytes", "current"),
        requested=value("requested_bytes", "current"),
        peak_allocated=value("allocated_bytes", "peak"),
        peak_reserved=value("reserved_bytes", "peak"),
        alloc_retries=counts[0],
        ooms=counts[1],
        capacity=capacity,
        device_used=None if capacity is None or free is None else capacity - free,
    )


def host_rss_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def _free_and_total(index: int) -> tuple[int | None, int | None]:
    try:
        return torch.accelerator.get_memory_info(index)
    except (AttributeError, RuntimeError, NotImplementedError):  # not every backend can tell
        return None, None
