"""Other processes on a GPU: what the driver's library says, and why it says nothing."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_memtools.memory.processes import GpuProcess, other_gpu_processes


@pytest.fixture
def rocm(monkeypatch):
    """torch as it is built for ROCm, and its library with three processes on the second GPU."""

    class AmdSmiException(Exception):  # noqa: N818, the library's name
        pass

    def listed(handle):
        if handle != "second":
            raise AmdSmiException("no such device")
        sizes = {os.getpid(): 5, 11: 7, 12: 9}
        return [{"pid": pid, "name": f"p{pid}", "memory_usage": {"vram_mem": n}} for pid, n in sizes.items()]

    library = SimpleNamespace(
        AmdSmiException=AmdSmiException,
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["first", "second"],
        amdsmi_get_gpu_process_list=listed,
    )
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("rocm")
def test_under_rocm_amdsmi_is_asked(monkeypatch):
    expected = [GpuProcess(12, "p12", 9), GpuProcess(11, "p11", 7)]
    assert other_gpu_processes(1) == expected
    assert other_gpu_processes(0) == "not known: no such device"
    assert str(other_gpu_processes(2)).startswith("not known: ")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert other_gpu_processes(0) == expected


def test_under_rocm_without_amdsmi_the_report_names_it(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert other_gpu_processes(0) == "not known: the package amdsmi, which comes with ROCm, is not installed"


def test_without_pynvml_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert other_gpu_processes(0) == "not known: NVML's package is missing (pip install 'lightning_memtools[nvml]')"


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
    assert (
        numbers_outside == "not known: of the 2 that the driver lists none has this process's number, as in a container"
    )
    assert through_nvml(monkeypatch) == "not known: the driver lists no process, not even this one, as in a container"


def test_an_error_of_the_drivers_library_is_a_line_of_the_report(monkeypatch):
    def broken(_: int) -> None:
        raise OSError("driver is gone")

    monkeypatch.setattr("lightning_memtools.memory.processes._through_nvml", broken)
    monkeypatch.setattr(torch.version, "hip", None)
    assert other_gpu_processes(0) == "not known: OSError: driver is gone"
