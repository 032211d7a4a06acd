"""`estimate_memory` beside PyTorch's own CUDA code on every GPU of the table, for a handful of models.

Needs PyTorch's CUDA build, torchvision and timm; no GPU. Other GPUs have other kernels, workspaces and alignments. Each
GPU has a process of its own, which runs truth.py:

    PYTHONPATH=.venv-cuda/zoo python -m lightning_memtools.null_cuda benchmarks/truth_gpus.py [--gpu NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import save

from lightning_memtools.memory.sizes import known_gpus

HERE = Path(__file__).parent
CASES = (
    "resnet50, bf16-true, AdamW, channels last",
    "resnet34, 16-mixed, Adam",
    "vit_small_patch16_224, bf16-mixed, AdamW, clip 1",
    "gpt2, bf16-true, AdamW",
    "llama, bf16-mixed, Adam, accumulate 2",
    "roberta, 32-true, SGD",
)


def on_gpu(name: str, folder: Path) -> dict[str, Any]:
    """Run the cases on a GPU's kernels, and return how far estimates are from the truth."""
    written = folder / f"{name}.json"
    command = [sys.executable, "-m", "lightning_memtools.null_cuda", "--gpu", name, str(HERE / "truth.py")]
    command += ["--only", "|".join(CASES), "--kept", str(folder / name), "--write", str(written)]
    begin = time.perf_counter()
    run = subprocess.run(
        command, env=os.environ | {"TRUTH_GPU": name}, capture_output=True, text=True, check=False, timeout=1800
    )
    if run.returncode or not written.is_file():
        return {"error": f"ended with {run.returncode}: {run.stderr.strip().splitlines()[-1:]}"}
    cases = {key: one for key, one in json.loads(written.read_text()).items() if key in CASES}
    real = {key: one for key, one in cases.items() if "error" not in one}
    return {
        "cases": len(cases),
        "compared": len(real),
        "allocated_equal": sum(one["allocated_error_pct"] == 0 for one in real.values()),
        "reserved_equal": sum(one["reserved_error_pct"] == 0 for one in real.values()),
        "largest_allocated_error_pct": max((abs(one["allocated_error_pct"]) for one in real.values()), default=None),
        "largest_reserved_error_pct": max((abs(one["reserved_error_pct"]) for one in real.values()), default=None),
        "different": {
            key: [one["allocated_error_pct"], one["reserved_error_pct"]]
            for key, one in real.items()
            if one["allocated_error_pct"] or one["reserved_error_pct"]
        },
        "errors": {key: one["error"] for key, one in cases.items() if "error" in one},
        "estimate_seconds": round(sum(one["estimated"]["seconds"] for one in real.values()), 2),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> None:
    """Measure every GPU, and save the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="*", help="the GPUs (default: all that are known)")
    chosen = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.gpu or [gpu.name for gpu in known_gpus()]:
            found[name] = on_gpu(name, Path(folder))
            print(name, json.dumps(found[name]), flush=True)
    if chosen.gpu:
        return
    compared = [one for one in found.values() if one.get("compared")]
    whole = {
        "gpus": len(found),
        "compared": sum(one["compared"] for one in compared),
        "allocated_equal": sum(one["allocated_equal"] for one in compared),
        "reserved_equal": sum(one["reserved_equal"] for one in compared),
        "largest_allocated_error_pct": max(one["largest_allocated_error_pct"] for one in compared),
        "largest_reserved_error_pct": max(one["largest_reserved_error_pct"] for one in compared),
        "median_estimate_seconds": statistics.median(one["estimate_seconds"] for one in compared),
    }
    save("truth_gpus", {"cases": list(CASES), "summary": whole, "gpus": found})


if __name__ == "__main__":
    main()
