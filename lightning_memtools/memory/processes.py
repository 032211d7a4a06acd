"""The other processes that use a GPU, as `nvidia-smi` lists them (through NVML)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from lightning_memtools.memory.sizes import format_size


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU.

    Attributes:
        pid: Its number, as the driver sees it. Inside a container the number may be another one.
        name: The name of its program; empty where the system does not tell.
        used_bytes: The memory that it holds; None where the driver does not tell.
    """

    pid: int
    name: str
    used_bytes: int | None

    def __str__(self) -> str:
        return f"{self.name or 'process'} (pid {self.pid}, {format_size(self.used_bytes)})"


class _NotKnownError(Exception):
    """The processes are not known; the message says why."""


def in_words(processes: Sequence[GpuProcess] | str) -> str:
    """Return the processes as text, or the reason why they are not known."""
    return processes if isinstance(processes, str) else ", ".join(map(str, processes)) or "none"


def other_gpu_processes(index: int) -> list[GpuProcess] | str:
    """Return the other processes on CUDA device `index`, largest first, or the reason why they are not known."""
    if torch.version.hip is not None:
        return "not known under ROCm"
    try:
        found = _through_nvml(index)
    except _NotKnownError as error:
        return f"not known: {error}"
    except Exception as error:  # noqa: BLE001, a driver's library may raise anything, and this is only one line of a report
        return f"not known: {type(error).__name__}: {error}"
    # This process holds memory of the device, so it must be in the list. Inside a container the driver may list
    # processes by the numbers that they have outside, or list none at all.
    if not found:
        return "not known: the driver lists no process, not even this one, as in a container"
    if all(process.pid != os.getpid() for process in found):
        return f"not known: of the {len(found)} that the driver lists none has this process's number, as in a container"
    others = (process for process in found if process.pid != os.getpid())
    return sorted(others, key=lambda process: process.used_bytes or 0, reverse=True)


def _through_nvml(index: int) -> list[GpuProcess]:
    try:
        import pynvml  # noqa: PLC0415, an extra
    except ImportError:
        raise _NotKnownError("NVML's package is missing (pip install 'lightning_memtools[nvml]')") from None
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise _NotKnownError(str(error)) from None
    return [GpuProcess(process.pid, _name(process.pid), process.usedGpuMemory) for process in running]


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""
