"""What VirtualDevice costs: the slow-down of a training step beside torch's own MemTracker, and its own host memory.

The three cases of a repeat (no tracking, VirtualDevice, MemTracker) run one after the other, and the ratios are taken
within the repeat. Times are processor time of one thread, which other programs on the machine disturb less.

    python benchmarks/virtual_device.py
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from machine import save, spread
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_memtools import VirtualDevice

REPEATS = 9
WARM_UP, STEPS = 2, 8
Make = Callable[[], tuple[nn.Module, torch.Tensor]]


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    """Twelve blocks of convolution, batch norm and ReLU on 8 images of 32 x 32."""
    layers: list[nn.Module] = []
    for block in range(12):
        layers += [nn.Conv2d(3 if block == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)), torch.randn(8, 3, 32, 32)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Four encoder layers of width 256 on 8 sequences of 64."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4), torch.randn(8, 64, 256)


def small_transformer() -> tuple[nn.Module, torch.Tensor]:
    """The same, so small that operators cost little beside what they are wrapped in: the worst case."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4), torch.randn(4, 16, 64)


def step_ms(make: Make, tracked_by: str) -> tuple[float, int]:
    """The median time of a training step with Adam, and how many blocks the last one asked for."""
    torch.manual_seed(0)
    model, inputs = make()
    optimizer = torch.optim.Adam(model.parameters())
    device = VirtualDevice("24GiB")
    tracker = MemTracker()

    def step() -> float:
        begun = time.process_time()
        if tracked_by == "mem_tracker":
            # Its statistics per module hold one iteration.
            tracker.reset_mod_stats()
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return (time.process_time() - begun) * 1e3

    if tracked_by == "virtual_device":
        with device:
            device.track(model, optimizer, inputs)
            times = [step() for _ in range(WARM_UP + STEPS)]
    elif tracked_by == "mem_tracker":
        tracker.track_external(model, optimizer, inputs)
        with tracker:
            times = [step() for _ in range(WARM_UP + STEPS)]
    else:
        times = [step() for _ in range(WARM_UP + STEPS)]
    given_out = device._allocator.memory_stats()["allocation.all.allocated"]
    return statistics.median(times[WARM_UP:]), given_out // (WARM_UP + STEPS)


def slow_down(make: Make) -> dict[str, Any]:
    """Ratios of a step's time with tracking to the time without, per repeat."""
    plain_ms, ratios, blocks = [], {"virtual_device": [], "mem_tracker": []}, 0  # type: ignore[var-annotated]
    for _ in range(REPEATS):
        plain, _ = step_ms(make, "nothing")
        plain_ms.append(plain)
        for tracked_by, found in ratios.items():
            tracked, given_out = step_ms(make, tracked_by)
            found.append(tracked / plain)
            blocks = max(blocks, given_out)
    return {
        "plain_step_ms": spread(plain_ms),
        "blocks_per_step": blocks,
        **{f"{tracked_by}_times_plain": spread(found) for tracked_by, found in ratios.items()},
    }


def host_memory() -> dict[str, Any]:
    """Bytes of Python objects that a device adds: over a million events (made or freed), and per live storage."""
    with VirtualDevice("24GiB") as device:
        kept = [torch.empty(1000) for _ in range(300)]
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for event in range(500_000):
            kept[event % 300] = torch.empty(1000 + event % 7)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        per_million_events = after - before
        more = [torch.empty(1000) for _ in range(20_000)]
        per_storage = (tracemalloc.get_traced_memory()[0] - after) / len(more)
        del more
        tracemalloc.stop()
        events = device._allocator.memory_stats()["allocation.all.allocated"]
    return {
        "blocks_given_out": events,
        "bytes_more_after_a_million_events": per_million_events,
        "bytes_per_live_storage_with_its_tensor": round(per_storage),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases: tuple[Make, ...] = (convolutional, transformer, small_transformer)
    measured: dict[str, Any] = {make.__name__: {"what": make.__doc__, **slow_down(make)} for make in cases}
    save("virtual_device", {**measured, "host_memory": host_memory()})
