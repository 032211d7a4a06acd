"""Steps with activations in host memory on a GPU: their time and peak beside what the planner said of both.

It takes two minutes and about 12 GiB of the GPU. benchmarks/gpu.py runs it too.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.offload_choice import DeviceRates
from lightning_memtools.checkpointing.planning import StepPlanner
from lightning_memtools.simulation.step_trace import TracedStep

RUNS = 10
PLANS: dict[str, dict[str, Any]] = {
    "plain": {"memory_budget": 1.0},
    "recomputed": {"memory_budget": 0.3},
    "auto": {"memory_budget": 0.3, "offload": "auto", "host_memory": "32GiB"},
    "all offloaded": {"offload": True, "host_memory": "32GiB"},
}


def measure() -> dict[str, Any]:
    """Return for float32 and bfloat16 each plan's step time as a multiple of the plain one's, measured and said."""
    found: dict[str, Any] = {}
    for precision, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, batch_first=True) for _ in range(24)]
        model, given = nn.Sequential(*layers).cuda(), torch.randn(8, 512, 1024, device="cuda")

        def loss_of(model: nn.Module, args: Any, dtype: torch.dtype | None = dtype) -> torch.Tensor:
            with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
                loss: torch.Tensor = model(*args).float().square().mean()
            return loss

        planner = StepPlanner(TracedStep(model, (given,), loss_of, device="cuda"))
        rates = DeviceRates.of(given.device, dtype or torch.float32)
        found[precision] = {"rates": str(rates)}
        plain_ms = 0.0
        for name, options in PLANS.items():
            plan = planner.plan(CheckpointOptions.parse(bn_dropout="recompute", **options))
            with AppliedPlan(model, plan.chains):
                peak, times = timed(model, given, loss_of)
            plain_ms = plain_ms or statistics.median(times)
            found[precision][name] = {
                "ms": sorted(times),
                "relative_time": statistics.median(times) / plain_ms,
                "relative_time_said": plan.relative_time or 1 + plan.extra_operations,
                "peak_bytes": peak,
                "peak_bytes_said": plan.peak_bytes,
                "host_bytes": plan.host_bytes,
            }
            print(precision, name, found[precision][name], flush=True)
    return found


def timed(model: nn.Module, given: torch.Tensor, loss_of: Callable[..., torch.Tensor]) -> tuple[int, list[float]]:
    """Return the peak of allocated memory, and milliseconds of steps, the first three of them left out."""
    gc.collect()
    times = []
    for at in range(RUNS + 3):
        if at == RUNS:
            torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        loss = loss_of(model, (given,))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return torch.cuda.max_memory_allocated(), times[3:]
