"""Who else uses a GPU: what `nvidia-smi` lists, through NVML, or under ROCm what `amd-smi` lists."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU.

    Attributes:
        pid: Its number, as the driver sees it (in a container that may be another than inside).
        name: Its program's name, or "" where the system does not say.
        used_bytes: What it holds; None where the driver does not say.
    """

    pid: int
    name: str
    used_bytes: int | None


def other_gpu_processes(index: int) -> list[GpuProcess] | str:
    """The other processes on CUDA device `index`, largest first, or the reason why they are not known."""
    if torch.version.hip is not None:
        return _through_amdsmi(index)
    try:
        import pynvml  # noqa: PLC0415, an extra
    except ImportError:
        return "not known: pip install 'lightning_memtools[nvml]'"
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"not known: {error}"
    found = [GpuProcess(p.pid, _name(p.pid), p.usedGpuMemory) for p in running if p.pid != os.getpid()]
    return sorted(found, key=lambda process: process.used_bytes or 0, reverse=True)


def _through_amdsmi(index: int) -> list[GpuProcess] | str:
    try:
        import amdsmi  # noqa: PLC0415, comes with ROCm
    except ImportError:
        return "not known: the package amdsmi, which comes with ROCm, is not installed"
    try:
        amdsmi.amdsmi_init()
        try:
            handle = amdsmi.amdsmi_get_processor_handles()[_physical_index(index)]
            running = amdsmi.amdsmi_get_gpu_process_list(handle)
        finally:
            amdsmi.amdsmi_shut_down()
        found = [GpuProcess(p["pid"], p["name"], p["memory_usage"]["vram_mem"]) for p in running]
    except (amdsmi.AmdSmiException, IndexError, KeyError, TypeError, ValueError) as error:
        return f"not known: {error}"
    return sorted(
        (process for process in found if process.pid != os.getpid()),
        key=lambda process: process.used_bytes or 0,
        reverse=True,
    )


def _physical_index(index: int) -> int:
    """Which of the machine's GPUs this process calls by that number: amdsmi counts all."""
    visible = os.environ.get("HIP_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES")
    return index if not visible else int(visible.split(",")[index])


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""
