"""The simulated allocator against the real one."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.cuda_texts import MARK


@pytest.mark.cuda_memory
def test_the_error_has_the_wording_of_the_real_one() -> None:
    clean_up()
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError) as real:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    # Fake tensors: nobody has this much host memory.
    with FakeTensorMode(), VirtualDevice(f"{total}B"), pytest.raises(torch.OutOfMemoryError) as simulated:
        torch.empty(2 * total, dtype=torch.uint8)
    assert without_figures(str(simulated.value).removesuffix(f" {MARK}")) == without_figures(str(real.value))


def clean_up() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def without_figures(text: str) -> str:
    """The words between the figures; what other processes there are differs from machine to machine."""
    text = re.sub(r" Process \d+ has [\d.]+ \w+ memory in use\.", "", text)
    return re.sub(r"[\d.]+ (bytes|[KMG]iB)", "#", text)
