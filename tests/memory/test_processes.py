"""Other processes on a GPU: what the driver's library says, and why it says nothing."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import psutil
import torch

from lightning_memtools.memory.processes import GpuProcess, other_gpu_processes


def through_nvml(monkeypatch, *numbers: int) -> list[GpuProcess] | str:
    """What is said where the driver lists processes of these numbers."""
    running = [SimpleNamespace(pid=pid, usedGpuMemory=100 + at) for at, pid in enumerate(numbers)]
    library = SimpleNamespace(
        NVMLError=KeyError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda uuid: running if uuid == "GPU-12ab" else [],
    )
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="12ab"))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return other_gpu_processes(0)


def test_nvml_lists_the_others_and_not_this_process(monkeypatch):
    parent = os.getppid()
    found = through_nvml(monkeypatch, os.getpid(), 2**22 + 1, parent)
    assert isinstance(found, list)
    assert [(one.pid, one.used_bytes) for one in found] == [(parent, 102), (2**22 + 1, 101)]
    assert found[0].name == psutil.Process(parent).name()
    assert not found[1].name  # it is no process of this machine
    assert through_nvml(monkeypatch, os.getpid()) == []


def test_in_a_container_this_process_is_not_taken_for_another(monkeypatch):
    numbers_outside = through_nvml(monkeypatch, 2**22 + 1, 2**22 + 2)
    for said, listed in ((numbers_outside, "of the 2 that"), (through_nvml(monkeypatch), "lists no process")):
        assert said.startswith("not known: ")
        assert listed in said
        assert "container" in said
