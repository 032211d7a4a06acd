"""The history is bounded, has Python stacks only, and what somebody else records goes on."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.memory import history_recording
from lightning_memtools.memory.history_recording import record
from lightning_memtools.memory.readers import CudaReader
from lightning_memtools.memory.virtual import VirtualDevice


@pytest.mark.cuda_memory
def test_a_recording_on_cuda_that_other_code_began_continues():
    torch.cuda.memory._record_memory_history(max_entries=7)
    try:
        record(CudaReader(torch.device("cuda", 0))).stop()
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_an_allocator_that_keeps_no_history_is_no_error(monkeypatch) -> None:
    def refuse() -> bool:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", refuse, raising=False)
    assert record(object.__new__(CudaReader)) is None
    assert record(None) is None


def test_on_a_simulated_device_the_last_actions_are_kept_and_what_other_code_records_continues(monkeypatch):
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
        device.record_history(7)  # by other code: it continues
        own = device.history
        record(device).stop()
        assert device.history is own
