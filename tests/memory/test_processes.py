"""Other processes on a GPU: what the driver's library says, and why it says nothing."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

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


def test_under_rocm_without_amdsmi_that_is_said(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert other_gpu_processes(0) == "not known: the package amdsmi, which comes with ROCm, is not installed"


def test_without_pynvml_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert other_gpu_processes(0) == "not known: pip install 'lightning_memtools[nvml]'"
