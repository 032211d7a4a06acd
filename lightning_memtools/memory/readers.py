"""Readers of real accelerators (CUDA and ROCm, MPS, and all that torch.accelerator supports) and of host memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.memory.virtual import VirtualDevice


def reader_for(device: torch.device) -> MemoryReader | None:
    """Return the reader of a device's memory: the active VirtualDevice, else the accelerator's own statistics.

    It is None on the plain CPU, and on devices that keep no statistics.
    """
    virtual = VirtualDevice.current()
    if virtual is not None and device.type == "cpu":
        return virtual
    return accelerator_reader(device)


@functools.cache
def accelerator_reader(device: torch.device) -> MemoryReader | None:
    """Return the reader of an accelerator, one per device and process; None where the device keeps no statistics."""
    reader: MemoryReader
    if device.type == "cuda":
        reader = CudaReader(device)
    elif device.type == "mps":
        reader = MpsReader()
    elif (
        hasattr(torch.accelerator, "memory_stats")  # since torch 2.9
        and torch.accelerator.is_available()
        and torch.accelerator.current_accelerator() == torch.device(device.type)
    ):
        reader = AcceleratorReader(device)
    else:
        return None
    try:
        known = reader.stats().allocated is not None
    except (RuntimeError, NotImplementedError):  # raised by backends without an allocator of their own
        return None
    return reader if known else None


class AcceleratorReader:
    """Reads any accelerator through torch.accelerator."""

    simulated = False

    def __init__(self, device: torch.device) -> None:
        # A device without an index means the current one.
        self.index = device.index if device.index is not None else torch.accelerator.current_device_index()
        self.name = f"{device.type}:{self.index}"

    def stats(self) -> MemoryStats:
        """Read the statistics with two host calls, neither of which waits for the device."""
        flat = torch.accelerator.memory_stats(self.index)
        free, total = _free_and_total(self.index)
        return MemoryStats(
            allocated=flat.get("allocated_bytes.all.current"),
            reserved=flat.get("reserved_bytes.all.current"),
            active=flat.get("active_bytes.all.current"),
            inactive_split=flat.get("inactive_split_bytes.all.current"),
            requested=flat.get("requested_bytes.all.current"),
            peak_allocated=flat.get("allocated_bytes.all.peak"),
            peak_reserved=flat.get("reserved_bytes.all.peak"),
            alloc_retries=flat.get("num_alloc_retries"),
            ooms=flat.get("num_ooms"),
            capacity=total,
            device_used=None if total is None or free is None else total - free,
        )

    def reset_peaks(self) -> None:
        """Set both peaks to the current values."""
        torch.accelerator.reset_peak_memory_stats(self.index)

    def empty_cache(self) -> None:
        """Release unused cached memory."""
        torch.accelerator.empty_cache()

    def composition_at_peak(self) -> Mapping[str, int] | None:
        """Return None: a real device does not know the categories."""
        return None


class CudaReader(AcceleratorReader):
    """Reads CUDA (or ROCm) through the nested dict, which saves torch flattening and sorting it at every call."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.name = f"cuda:{self.index} ({torch.cuda.get_device_name(self.index)})"

    def stats(self) -> MemoryStats:
        """Read the statistics with two host calls, neither of which waits for the device."""
        free, total = torch.cuda.mem_get_info(self.index)
        return stats_from_nested(torch.cuda.memory_stats_as_nested_dict(self.index), capacity=total, free=free)

    def reset_peaks(self) -> None:
        """Set both peaks to the current values."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def empty_cache(self) -> None:
        """Release unused cached memory."""
        torch.cuda.empty_cache()


class MpsReader:
    """Reads Apple's Metal device, which keeps no peaks and no counts of events."""

    simulated = False
    name = "mps"

    def stats(self) -> MemoryStats:
        """Read what Metal reports: allocated, reserved by its driver, and the recommended maximum as capacity."""
        driver = torch.mps.driver_allocated_memory()
        return MemoryStats(
            allocated=torch.mps.current_allocated_memory(),
            reserved=driver,
            capacity=torch.mps.recommended_max_memory(),
        )

    def reset_peaks(self) -> None:
        """Metal keeps no peaks."""

    def empty_cache(self) -> None:
        """Release unused cached memory."""
        torch.mps.empty_cache()

    def composition_at_peak(self) -> Mapping[str, int] | None:
        """Return None: a real device does not know the categories."""
        return None


def allocated_bytes(reader: MemoryReader) -> int:
    """Return only the allocated bytes: on CUDA without asking the driver, as `stats` does for capacity and use."""
    if isinstance(reader, CudaReader):
        nested = torch.cuda.memory_stats_as_nested_dict(reader.index)
        return int(nested["allocated_bytes"]["all"]["current"]) if nested else 0
    return reader.stats().allocated or 0


def stats_from_nested(nested: Mapping[str, Any], *, capacity: int | None, free: int | None) -> MemoryStats:
    """Convert what `torch.cuda.memory_stats_as_nested_dict` returns, which is an empty dict before the first use."""
    if not nested:
        used = None if capacity is None or free is None else capacity - free
        return MemoryStats(allocated=0, reserved=0, active=0, inactive_split=0, requested=0, peak_allocated=0,
                           peak_reserved=0, alloc_retries=0, ooms=0, capacity=capacity, device_used=used)  # fmt: skip
    allocated = nested["allocated_bytes"]["all"]
    reserved = nested["reserved_bytes"]["all"]
    return MemoryStats(
        allocated=allocated["current"],
        reserved=reserved["current"],
        active=nested["active_bytes"]["all"]["current"],
        inactive_split=nested["inactive_split_bytes"]["all"]["current"],
        requested=nested["requested_bytes"]["all"]["current"],
        peak_allocated=allocated["peak"],
        peak_reserved=reserved["peak"],
        alloc_retries=nested["num_alloc_retries"],
        ooms=nested["num_ooms"],
        capacity=capacity,
        device_used=None if capacity is None or free is None else capacity - free,
    )


def host_rss_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(_process(os.getpid()).memory_info().rss)


@functools.cache
def _process(pid: int) -> psutil.Process:
    # psutil reads two files of the system to make one, which takes longer than to ask it.
    return psutil.Process(pid)


def _free_and_total(index: int) -> tuple[int | None, int | None]:
    try:
        return torch.accelerator.get_memory_info(index)
    except (AttributeError, RuntimeError, NotImplementedError):  # not every backend can tell
        return None, None
