"""Measures a real step on this CPU: plain, with a plan, and compiled by torch's inductor at memory budgets.

Each in a process of its own, whose resident memory is read: highest during a step, above what it was before. Needs
Linux and a C++ compiler. Writes results/checkpointing_inductor.json.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from checkpointing_models import encoder
from machine import save

from lightning_memtools.checkpointing.planning import plan_checkpoints

DEPTH, BATCH, STEPS = 12, 32, 5
CASES: dict[str, dict[str, float | None]] = {
    "plain": {},
    "planned, default arguments": {"memory_budget": None},
    "planned, memory_budget=0.5": {"memory_budget": 0.5},
    "compiled": {"activation_memory_budget": 1.0},
    "compiled, activation_memory_budget=0.5": {"activation_memory_budget": 0.5},
    "compiled, activation_memory_budget=0.1": {"activation_memory_budget": 0.1},
}


def resident(field: str) -> int:
    """A figure of this process's memory, in bytes: VmRSS, or VmHWM, its highest since it was reset."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def measure(case: str) -> dict[str, Any]:
    """A step's highest resident memory above that before it, and the processor's seconds, after one step to warm up."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = CASES[case]
    model, x = encoder(DEPTH, 0.0), torch.randn(BATCH, 128, 256)
    plan = plan_checkpoints(model, x, **options) if "memory_budget" in options else None  # type: ignore[arg-type]
    budget = options.get("activation_memory_budget")
    run = model if budget is None else torch.compile(model)
    with functorch_config.patch(activation_memory_budget=budget or 1.0), plan.apply(model) if plan else nullcontext():
        run(x).sum().backward()
        seconds, bytes_ = [], []
        for _ in range(STEPS):
            model.zero_grad()
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
            before, begin = resident("VmRSS"), time.process_time()
            run(x).sum().backward()
            seconds.append(time.process_time() - begin)
            bytes_.append(resident("VmHWM") - before)
    found = {"step_bytes": statistics.median(bytes_), "processor_seconds": statistics.median(seconds)}
    print(case, found, flush=True)
    return found


def main() -> None:
    """Measure every case."""
    # Otherwise freed tensors of up to 32 MiB would stay with the process.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    results = {}
    for case in CASES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            results[case] = pool.submit(measure, case).result()
    save("checkpointing_inductor", {"model": f"{DEPTH} blocks, batch {BATCH}", "steps": STEPS, "cases": results})


if __name__ == "__main__":
    main()
