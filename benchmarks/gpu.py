"""What only a real GPU can say: estimates beside its allocator, what emptying its cache costs, steps with a plan.

    PYTHONPATH=.venv/zoo python benchmarks/gpu.py [estimates | asking | plans ...]

It takes some ten minutes and at most 12 GiB of the GPU, and writes each part into results/gpu.json, under the GPU's
name. torchvision and timm lie in .venv/zoo; see tests/zoo.py.
"""

from __future__ import annotations

import gc
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from machine import known, save, spread
from torch import Tensor, nn
from truth import clean_up, errors_of, estimated, real_peaks
from truth_models import cases

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.planning import StepPlanner
from lightning_memtools.simulation.step_trace import TracedStep

ESTIMATED = (
    *("perceptron", "resnet50", "dla34", "mobilenet_v2", "convnext_tiny", "vit_small_patch16_224", "swin_t"),
    *("gpt2", "llama", "bert", "t5", "lstm", "gru", "multi-head attention", "attention causal", "layer norm"),
)
"""Models and operators of truth.py's sweep, each with all of its settings."""
RUNS = 10
PLANS: dict[str, dict[str, Any]] = {
    "plain": {"memory_budget": 1.0},
    "recomputed": {"memory_budget": 0.3},
}


# --- estimates


def estimates() -> dict[str, Any]:
    """The real peaks of each case, and by how many percent the estimate of allocated and reserved memory is off."""
    found: dict[str, Any] = {}
    for case in cases():
        if case.name in ESTIMATED:
            try:
                one: dict[str, Any] = {"real": real_peaks(case), "estimated": estimated(case)[0]}
            except RuntimeError as error:  # out of memory, or a kernel that this GPU lacks
                found[case.key] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            else:
                off = [round(error, 3) for error in errors_of(one)]
                found[case.key] = {**one["real"], "allocated_error_pct": off[0], "reserved_error_pct": off[1]}
            print(case.key, found[case.key], flush=True)
    good = [one for one in found.values() if "error" not in one]
    mean = {name: round(statistics.fmean(abs(one[f"{name}_error_pct"]) for one in good), 3)
            for name in ("allocated", "reserved")}  # fmt: skip
    return {"compared": len(good), "mean_error_pct": mean, "cases": found}


# --- memory that is asked for again


def asking() -> dict[str, Any]:
    """What EmptyCache gives back has to be asked for again: how long that takes, and giving it back, in ms.

    A step allocates 2 GiB in segments of one size and frees them. It is timed with segments that are kept, and right
    after the cache was emptied; in between the device is waited for, as it is at the end of an evaluation.
    """
    found = {}
    for mib in (20, 64, 256):
        sizes = [mib * 2**20] * (2048 // mib)
        kept, emptied, asked = [], [], []
        for _ in range(21):
            timed_allocations(sizes)  # so that there is something to keep
            kept.append(timed_allocations(sizes))
            begin = time.perf_counter()
            torch.cuda.empty_cache()
            emptied.append(1000 * (time.perf_counter() - begin))
            asked.append(timed_allocations(sizes))
        clean_up()
        found[f"{len(sizes)} segments of {mib} MiB"] = {
            "kept_ms": spread(kept),
            "empty_cache_ms": spread(emptied),
            "asked_again_ms": spread(asked),
        }
    return found


def timed_allocations(sizes: list[int]) -> float:
    """Milliseconds to allocate blocks of these sizes, all at once; they are freed again."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    elapsed_ms = 1000 * (time.perf_counter() - begin)
    del blocks
    return elapsed_ms


# --- steps with a plan


def plans() -> dict[str, Any]:
    """For float32 and bfloat16 each plan's time as a multiple of the plain step's, and its peak, measured and said."""
    found: dict[str, Any] = {}
    for precision, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, batch_first=True) for _ in range(24)]
        model, given = nn.Sequential(*layers).cuda(), torch.randn(8, 512, 1024, device="cuda")

        def loss_of(model: nn.Module, args: Any, dtype: torch.dtype | None = dtype) -> Tensor:
            with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
                loss: Tensor = model(*args).float().square().mean()
            return loss

        planner = StepPlanner(TracedStep(model, (given,), loss_of, device="cuda"))
        plain_ms = 0.0
        for name, options in PLANS.items():
            plan = planner.plan(CheckpointOptions.parse(bn_dropout="recompute", **options))
            with AppliedPlan(model, plan.chains):
                peak, times = timed_steps(model, given, loss_of)
            plain_ms = plain_ms or statistics.median(times)
            found[f"{precision}, {name}"] = {
                "ms": spread(times),
                "time": [statistics.median(times) / plain_ms, 1 + plan.extra_operations],
                "peak_bytes": [peak, plan.peak_bytes],
            }
    return found


def timed_steps(model: nn.Module, given: Tensor, loss_of: Callable[..., Tensor]) -> tuple[int, list[float]]:
    """The peak of allocated memory, and milliseconds of steps, the first three of them left out."""
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


PARTS: dict[str, Callable[[], dict[str, Any]]] = {part.__name__: part for part in (estimates, asking, plans)}


def main() -> int:
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py compares with a real GPU, and there is no CUDA device here: nothing measured.")
        return 1
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    gpu = torch.cuda.get_device_name()
    for name in sys.argv[1:] or PARTS:
        save("gpu", known("gpu").get(gpu, {}) | {name: PARTS[name]()}, section=gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
