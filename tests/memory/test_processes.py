"""Other processes on a GPU: those that torch lists, and why there are none. tests/null_cuda runs the real thing."""

from __future__ import annotations

import os

import psutil
import torch

from lightning_memtools.memory.processes import GpuProcess, other_gpu_processes

MIB = 2**20


def listed(monkeypatch, *lines: str) -> list[GpuProcess] | str:
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda _: "\n".join(lines))
    return other_gpu_processes(0)


def uses(pid: int, mib: int) -> str:
    """A line of torch's."""
    return f"process {pid:>10d} uses {mib:>12.3f} MB GPU memory"


def test_the_others_are_listed_and_this_process_is_not(monkeypatch):
    parent = os.getppid()
    found = listed(monkeypatch, "GPU:0", uses(os.getpid(), 100), uses(2**22 + 1, 101), uses(parent, 102))
    assert found == [
        GpuProcess(parent, psutil.Process(parent).name(), 102 * MIB),
        GpuProcess(2**22 + 1, "", 101 * MIB),  # it is no process of this machine
    ]
    assert listed(monkeypatch, "GPU:0", uses(os.getpid(), 100)) == []


def test_in_a_container_this_process_is_not_taken_for_another(monkeypatch):
    for lines in ([uses(2**22 + 1, 5), uses(2**22 + 2, 5)], ["no processes are running"]):
        said = listed(monkeypatch, "GPU:0", *lines)
        assert said.startswith("not known: none of the ")
        assert "container" in said


def test_what_torch_says_in_place_of_a_list_is_the_reason(monkeypatch):
    assert listed(monkeypatch, "pynvml module not found") == "not known: pynvml module not found"
