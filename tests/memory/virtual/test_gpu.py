"""The simulated allocator against the real one. The models and the measuring are those of benchmarks/gpu.py."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.cuda_texts import MARK

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("gpu")
    for name in ("gpu", "machine"):
        sys.modules.pop(name, None)


@pytest.mark.cuda_memory
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("model", ["multilayer_perceptron", "dropouts", "blocks", "language_model"])
def test_peaks_are_those_of_the_real_allocator(gpu: Any, model: str, optimizer: str) -> None:
    assert model in gpu.EXACT
    found = gpu.compare(model, optimizer, gpu.cublas_workspace())
    difference = found["difference_pct"]
    assert abs(difference["peak_allocated_without_workspaces"]) <= 0.5, found
    assert abs(difference["allocated_at_end"]) <= 0.5, found
    assert abs(difference["peak_reserved"]) <= 3, found


@pytest.mark.cuda_memory
def test_the_error_has_the_wording_of_the_real_one(gpu: Any) -> None:
    gpu.clean_up()
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError) as real:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    # Fake tensors: nobody has this much host memory.
    with FakeTensorMode(), VirtualDevice(f"{total}B"), pytest.raises(torch.OutOfMemoryError) as simulated:
        torch.empty(2 * total, dtype=torch.uint8)
    assert without_figures(str(simulated.value).removesuffix(f" {MARK}")) == without_figures(str(real.value))


def without_figures(text: str) -> str:
    """The words between the figures; what other processes there are differs from machine to machine."""
    text = re.sub(r" Process \d+ has [\d.]+ \w+ memory in use\.", "", text)
    return re.sub(r"[\d.]+ (bytes|[KMG]iB)", "#", text)
