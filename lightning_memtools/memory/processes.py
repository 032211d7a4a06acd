"""The other processes that use a GPU, as `torch.cuda.list_gpu_processes` lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from lightning_memtools.memory.sizes import MIB, format_size

_LINE = re.compile(r"process +(\d+) uses +([\d.]+) MB")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU.

    Attributes:
        pid: The process id that the driver reports. Inside a container the process may have another id.
        name: The name of the program; empty if it is not known.
        used_bytes: The GPU memory that the process holds; None if it is not known.
    """

    pid: int
    name: str
    used_bytes: int | None

    def __str__(self) -> str:
        return f"{self.name or 'process'} (pid {self.pid}, {format_size(self.used_bytes)})"


def in_words(processes: Sequence[GpuProcess] | str) -> str:
    """Format processes as comma-separated text. A string (the reason why none are known) is returned unchanged."""
    return processes if isinstance(processes, str) else ", ".join(map(str, processes)) or "none"


def other_gpu_processes(index: int) -> list[GpuProcess] | str:
    """List all other processes on CUDA device `index`, largest first; if that fails, return the reason as a string."""
    try:
        listed = torch.cuda.list_gpu_processes(index)
    except Exception as error:  # noqa: BLE001, a driver's library may raise anything, and this is only one line of a report
        return f"not known: {type(error).__name__}: {error}"
    sizes = {int(pid): round(float(used) * MIB) for pid, used in _LINE.findall(listed)}
    if not listed.startswith("GPU:"):
        return f"not known: {listed}"
    # This process holds memory of the device. Inside a container the driver may list processes by the numbers that they
    # have outside, or list none at all.
    if os.getpid() not in sizes:
        return f"not known: none of the {len(sizes)} that the driver lists is this process, as in a container"
    del sizes[os.getpid()]
    others = [GpuProcess(pid, _name(pid), used) for pid, used in sizes.items()]
    return sorted(others, key=lambda process: process.used_bytes or 0, reverse=True)


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""
