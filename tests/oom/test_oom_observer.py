"""torch's observers can be attached and not detached: one in a process, which is switched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_memtools.oom import failure_capture
from lightning_memtools.oom.failure_capture import observe

CUDA = torch.device("cuda", 0)


@pytest.fixture
def attached(monkeypatch) -> list[Any]:
    """What was attached to CUDA's allocators, where there is no CUDA: the two functions of torch that attach."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", found.append, raising=False)
    monkeypatch.setattr(failure_capture, "_attached", False)
    monkeypatch.setattr(failure_capture, "_listeners", [])
    return found


def test_an_error_of_a_listener_does_not_replace_the_out_of_memory_error(attached) -> None:
    heard: list[int] = []

    def fails(*_: int) -> None:
        raise KeyError("broken")

    observe(CUDA, fails)
    observe(CUDA, lambda _device, n_bytes, *_: heard.append(n_bytes))
    attached[0](0, 7, 10, 5)
    assert heard == [7]


@pytest.mark.usefixtures("attached")
def test_an_allocator_without_observers_is_reported_from_the_exception(monkeypatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuse)
    assert observe(CUDA, lambda *_: None) is None
