"""What an estimate costs: time and host memory, beside torch's MemTracker over the same fake step.

python benchmarks/estimate.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from estimate_models import ADAMW, MOMENTUM, LanguageModel, classify, images, next_token, resnet, texts
from machine import save, spread
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_memtools.estimate import estimate_memory

# 32 blocks of width 4096 and a head tied to 32,000 tokens: 6.6 billion parameters.
SEVEN_BILLION = partial(LanguageModel, 32, 4096, 32, 32_000)
LIMIT_SECONDS = 120
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any, Any]] = {
    "ResNet-50, batch 8": (partial(resnet, (3, 4, 6, 3), bottleneck=True), images(8), classify, MOMENTUM),
    "GPT-2 small, 4 x 512": (LanguageModel, texts(4, 512), next_token, ADAMW),
    "7B transformer, 1 x 1024": (SEVEN_BILLION, texts(1, 1024), next_token, ADAMW),
}


def estimate(name: str) -> dict[str, Any]:
    """One estimate of a model on meta."""
    build, batch, step, optimizer = MODELS[name]
    with torch.device("meta"):
        model = build()
    made = estimate_memory(model, batch("meta"), step=step, optimizer=optimizer, precision="32-true")
    return {
        "peak_allocated": made.peak_allocated,
        "peak_reserved": made.peak_reserved,
        "parameters": made.parameter_count,
    }


def mem_tracker(name: str) -> dict[str, Any]:
    """Two steps of the same model under torch's MemTracker: it has no reserved memory and no kernels of CUDA."""
    build, batch, step, optimizer = MODELS[name]
    with FakeTensorMode():
        model = build()
        chosen = optimizer(list(model.parameters()))
        fake = batch("cpu")
        tracker = MemTracker()
        tracker.track_external(model, chosen, *fake)
        with tracker:
            for _ in range(2):
                loss = step(model, fake)
                chosen.zero_grad()
                loss.backward()
                chosen.step()
                del loss
                tracker.reset_mod_stats()
        peak = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
    return {"peak_allocated": peak}


def one(how: str, name: str) -> dict[str, Any]:
    """Time one run in a fresh process, after a small one that loads and warms everything."""
    run = {"estimate_memory": estimate, "MemTracker": mem_tracker}[how]
    warm_up = nn.Linear(8, 8)
    estimate_memory(warm_up, torch.zeros(1, 8), step=lambda m, b: m(b).sum())
    before = resident_bytes()
    start, start_cpu = time.perf_counter(), time.process_time()
    figures = run(name)
    return {
        **figures,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        "host_bytes_before": before,
        "host_bytes_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123, Linux only
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_new_process(how: str, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", how, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_SECONDS} seconds"}
    if done.returncode != 0:
        return {"error": done.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(repeats: int) -> dict[str, Any]:
    """Every model with both, in turn."""
    measured: dict[str, Any] = {"load_average_at_start": os.getloadavg()[0]}
    for name in MODELS:
        runs: dict[str, list[dict[str, Any]]] = {"estimate_memory": [], "MemTracker": []}
        for _ in range(repeats):
            for how, results in runs.items():
                results.append(in_new_process(how, name))
        measured[name] = {how: _summary(results) for how, results in runs.items()}
        print(name, measured[name], flush=True)
    return measured


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    good = [result for result in results if "error" not in result]
    if len(good) < 2:
        return {"error": results[-1].get("error", "one run only")}
    figures = {
        key: value for key, value in good[-1].items() if key in {"peak_allocated", "peak_reserved", "parameters"}
    }
    timed = {key: spread([result[key] for result in good]) for key in ("seconds", "cpu_seconds")}
    added = max(result["host_bytes_peak"] - result["host_bytes_before"] for result in good)
    return {
        **figures,
        **timed,
        "host_bytes_peak": max(result["host_bytes_peak"] for result in good),
        "host_bytes_added": added,
    }


def main() -> int:
    """Measure, print and write results/estimate.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("HOW", "MODEL"))
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(one(*chosen.one)))
        return 0
    save("estimate", measure(chosen.repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
