"""The history is bounded, has Python stacks only, and what somebody else records goes on."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from lightning_memtools.memory import history_recording
from lightning_memtools.memory.history_recording import MOST_ENTRIES, record
from lightning_memtools.memory.readers import CudaReader
from lightning_memtools.memory.virtual import VirtualDevice


@pytest.fixture
def cuda(monkeypatch) -> list[dict[str, Any]]:
    """A CUDA reader's calls of torch's recording, with the arguments bound as the real function takes them."""
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(torch.cuda.memory._record_memory_history)

    def call(*args: Any, **kwargs: Any) -> None:
        calls.append(signature.bind(*args, **kwargs).arguments)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", call)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    return calls


READER = object.__new__(CudaReader)


def arguments(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (call | call.get("kwargs", {})).items() if name not in {"args", "kwargs"}}


def test_on_cuda_stacks_are_pythons_and_the_history_is_bounded(cuda):
    recorded = record(READER)
    (begun,) = map(arguments, cuda)
    assert begun["stacks"] == "python"
    assert begun["max_entries"] == MOST_ENTRIES
    assert MOST_ENTRIES <= 100_000
    assert begun["context"] == "alloc"
    recorded.stop()
    assert arguments(cuda[-1])["enabled"] is None


def test_a_recording_that_other_code_began_continues(cuda, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    recorded = record(READER)
    recorded.stop()
    assert not cuda
    with VirtualDevice() as device:
        device.record_history(7)
        own = device.history
        recorded = record(device)
        recorded.stop()
        assert device.history is own


def test_an_allocator_that_keeps_no_history_is_no_error(monkeypatch) -> None:
    def refuse() -> bool:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", refuse, raising=False)
    assert record(READER) is None
    assert record(None) is None


def test_on_a_simulated_device_the_last_actions_are_kept(monkeypatch):
    monkeypatch.setattr(history_recording, "MOST_ENTRIES", 5)
    with VirtualDevice() as device:
        recorded = record(device)
        begin = recorded.now()
        for _ in range(10):
            torch.empty(1000)
        assert recorded.now() > begin
        assert len(recorded.take()["device_traces"][0]) == 5
        recorded.stop()
        recorded.stop()  # twice does no harm
        assert device.history is None
