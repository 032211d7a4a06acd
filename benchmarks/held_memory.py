"""What the watch for growth adds to a step, and how long it takes to find who holds memory.

python benchmarks/held_memory.py
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from typing import Any

import torch
from machine import save
from torch import Tensor, nn

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.leaks.growth_watch import EVERY, GrowthWatch
from lightning_memtools.memory.leaks.holdings import find_holdings
from lightning_memtools.memory.leaks.leak_detector import SearchScope
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.owned import bytes_on_device
from lightning_memtools.memory.readers import allocated_bytes

STEP_MS = 1.0


class Holder(nn.Module):
    """Holds tensors in a list, a dict and an attribute."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.outs = [torch.zeros(1024) for _ in range(n // 2)]
        self.cache = {index: torch.zeros(512) for index in range(n - n // 2 - 1)}
        self.last = torch.zeros(4096)


def search_s(n: int) -> float:
    """Return the processor seconds of a search among n tensors that are held."""
    with VirtualDevice() as device:
        model = Holder(n)
        scope = SearchScope.around(model, [], None)
        begin = time.process_time()
        held = find_holdings(device.holds, model, [], None, scope)
        seconds = time.process_time() - begin
    assert {one.path for one in held.found} >= {"Holder.outs", "Holder.cache"}
    return seconds


def reading_us(n_layers: int) -> float:
    """Return the processor microseconds of one reading, as EmptyCache takes it."""
    with VirtualDevice("10GiB") as device:
        batch: list[Tensor] = [torch.zeros(64, 64) for _ in range(4)]
        kept: list[Any] = [nn.Linear(8, 8) for _ in range(n_layers)]
        watch, taken = GrowthWatch(), []
        for at in range(200):
            begin = time.process_time_ns()
            inputs = bytes_on_device(tensors_in(batch), device.holds, set())
            watch.read(allocated_bytes(device) - inputs, EVERY * at, 0)
            taken.append(time.process_time_ns() - begin)
        del kept
    return statistics.median(taken) / 1000


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    reading = {str(n): round(reading_us(n), 1) for n in (10, 1000)}
    found = {
        "what": "processor time of the watch for growth and of the search for holders",
        "reading_us": reading,
        "every": EVERY,
        "share_of_a_step_of_1_ms": round(max(reading.values()) / EVERY / (1000 * STEP_MS), 6),
        "search_s": {str(n): round(search_s(n), 3) for n in (100, 1000, 10_000)},
    }
    save("held_memory", found)


if __name__ == "__main__":
    main()
