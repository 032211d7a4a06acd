"""`estimate_memory` beside real GPU runs: peak allocated and reserved of many models, optimizers and precisions.

Needs a CUDA device; made to take under 8 minutes. Run by benchmarks/gpu.py, or alone:

    python benchmarks/gpu_estimates.py [--only NAME ...] [--minutes 8]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from estimate_models import CASES, Case
from machine import save
from torch import nn

from lightning_memtools.estimate import estimate_memory

STEPS = 3


def real_peaks(case: Case) -> dict[str, int]:
    """Peaks of the CUDA caching allocator from a clean start, workspaces taken anew."""
    clean_up()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() == 0, "something else holds memory of this process"
    model = case.build().train()
    dtype = torch.bfloat16 if case.precision == "bf16-true" else None
    model = model.to("cuda", dtype)
    train(case, model, dtype)
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def train(case: Case, model: nn.Module, dtype: torch.dtype | None) -> None:
    """Steps in Lightning's order, as the estimate runs them."""
    parameters = list(model.parameters())
    optimizer = case.optimizer(parameters)
    scaler = torch.amp.GradScaler("cuda") if case.precision == "16-mixed" else None
    host = case.batch("cpu")
    for _ in range(STEPS):
        batch = [on_device(tensor, dtype) for tensor in host]
        with case.attention(), autocast(case.precision):
            loss = case.step(model, batch)
        optimizer.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, case.clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        loss = loss.detach()
        del batch


def on_device(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to("cuda", dtype if tensor.is_floating_point() else None)


def autocast(precision: str) -> AbstractContextManager[Any]:
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    return torch.autocast("cuda", dtype=dtypes[precision]) if precision in dtypes else nullcontext()


def predicted_peaks(case: Case, capacity: str) -> dict[str, Any]:
    """The estimate of the same steps, made on this machine without its GPU."""
    with torch.device("meta"):
        model = case.build()
    start = time.perf_counter()
    with case.attention():
        estimate = estimate_memory(
            model,
            case.batch("meta"),
            step=case.step,
            optimizer=case.optimizer,
            precision=case.precision,
            clip=case.clip,
            steps=STEPS,
            capacity=capacity,
        )
    return {
        "allocated": estimate.peak_allocated,
        "reserved": estimate.peak_reserved,
        "peak_at": str(estimate.peak_at),
        "seconds": round(time.perf_counter() - start, 2),
    }


def clean_up() -> None:
    """Drop what earlier runs left: garbage, cuBLAS workspaces, cached blocks."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def compare(case: Case, capacity: str) -> dict[str, Any]:
    """Real and predicted peaks of one case, and the errors of the prediction in percent."""
    torch.manual_seed(0)
    real, predicted = real_peaks(case), predicted_peaks(case, capacity)
    errors = {
        f"{name}_error_pct": round(100 * (predicted[name] - real[name]) / real[name], 3)
        for name in ("allocated", "reserved")
    }
    return {"real": real, "predicted": predicted, **errors}


def capacity_of_this_gpu() -> str:
    """A GPU of the data file with as large a cuBLAS workspace as this one; only that depends on it."""
    return "H100 80GB" if torch.cuda.get_device_capability()[0] >= 9 else "A100 80GB"


def measure(names: list[str] | None = None, *, minutes: float = 8) -> dict[str, Any]:
    """Compare as many cases as the time allows, in their order; those that fail or are left out are named."""
    deadline = time.monotonic() + 60 * minutes
    capacity = capacity_of_this_gpu()
    compared: dict[str, Any] = {}
    failed: dict[str, str] = {}
    left_out: list[str] = []
    for case in CASES:
        if names and case.name not in names:
            continue
        if time.monotonic() > deadline:
            left_out.append(case.name)
            continue
        try:
            compared[case.name] = compare(case, capacity)
        except RuntimeError as error:  # out of memory, or a kernel that this GPU lacks: the others are still wanted
            failed[case.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(case.name, compared.get(case.name, failed.get(case.name)), flush=True)
    properties = torch.cuda.get_device_properties(0)
    gpu = {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "total_memory": properties.total_memory,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
    return {"gpu": gpu, "steps": STEPS, "cases": compared, "failed": failed, "left_out": left_out}


def main() -> int:
    """Measure, print and write results/gpu_estimates.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--dry", action="store_true", help="only the predictions, without a GPU; nothing is written")
    chosen = parser.parse_args()
    if chosen.dry:
        for case in CASES:
            if not chosen.only or case.name in chosen.only:
                print(case.name, predicted_peaks(case, "H100 80GB"), flush=True)
        return 0
    if not torch.cuda.is_available():
        print(
            "benchmarks/gpu_estimates.py compares with a real GPU, and there is no CUDA device here: nothing measured."
        )
        return 1
    save("gpu_estimates", measure(chosen.only, minutes=chosen.minutes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
