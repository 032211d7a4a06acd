"""What a dry run costs: a transformer of 7 billion parameters, FSDP 2 on 8 ranks, on a machine that could not hold it.

Needs a CUDA build of PyTorch and no GPU (docs/dry-run.md):
    .venv-cuda/bin/python -m lightning_memtools.null_cuda benchmarks/dry_run.py
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, save

from lightning_memtools import dry_run, estimate_memory

# Llama 2 7B: the sizes of transformers.LlamaConfig() are its own.
MODEL = """
    import lightning as L
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(L.LightningModule):
        def configure_model(self):
            with torch.device("meta"):
                self.model = LlamaForCausalLM(LlamaConfig(attn_implementation="sdpa"))
            # Not autocast: it would keep the gathered weights of every layer as bfloat16 until the step ends.
            options = {"mesh": self.device_mesh["data_parallel"], "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
            for layer in self.model.model.layers:
                fully_shard(layer, **options)
            fully_shard(self.model, **options)
            self.model.to_empty(device="cuda")
        def training_step(self, batch, _):
            return self.model(input_ids=batch, labels=batch).loss
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)
"""
TRAINING = """
    ranks = torch.cuda.device_count()
    trainer = L.Trainer(
        devices=ranks, strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        logger=False,
    )
    trainer.fit(Llama(), DataLoader(torch.zeros(1000, 1024, dtype=torch.int64), batch_size=1))
"""


def cpu_of_children() -> float:
    """Processor time of all processes that have ended, in seconds."""
    times = os.times()
    return times.children_user + times.children_system


def measured(script: Path, gpu: str, ranks: int) -> dict[str, Any]:
    """One dry run, with what it found and what it took."""
    start, cpu_before = time.perf_counter(), cpu_of_children()
    result = dry_run(script, gpu=gpu, devices=ranks, output=sys.stderr)
    seconds, cpu_seconds = time.perf_counter() - start, cpu_of_children() - cpu_before
    return {
        "status": result.status,
        "peak_allocated": {one.stage: one.peak_allocated for one in result.stages},
        "peak_reserved": {one.stage: one.peak_reserved for one in result.stages},
        "at_the_peak": {one.stage: one.by_category for one in result.stages},
        "smallest_fitting": result.smallest_fitting,
        "error": result.error,
        "has_report": result.report is not None,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        # The largest of all children so far: the first run is the larger one.
        "host_bytes_peak": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def estimated(ranks: int) -> dict[str, Any]:
    """One rank of the same model by `estimate_memory`, without a script or a Trainer, and what that took."""
    names: dict[str, Any] = {}
    exec(textwrap.dedent(MODEL), names)  # noqa: S102, the text above
    start, cpu_before = time.perf_counter(), time.process_time()
    batch = torch.zeros(1, 1024, dtype=torch.int64)
    found = estimate_memory(names["Llama"](), batch, strategy="fsdp2", devices=ranks)
    return {
        "peak_allocated": found.peak_allocated,
        "peak_reserved": found.peak_reserved,
        "notes": found.notes,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu_before, 1),
        "host_bytes_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Measure, print and write results/dry_run.json; `estimate` measures that part alone and keeps the rest."""
    file = RESULTS / "dry_run.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known.pop("machine", None)
    known["estimates"] = {"Llama 2 7B, FSDP 2, 8 ranks": estimated(8)}
    if sys.argv[1:] == ["estimate"]:
        save("dry_run", known)
        return
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "llama.py")
        script.write_text(textwrap.dedent(MODEL + TRAINING))
        load = os.getloadavg()[0]
        cases = {
            f"Llama 2 7B, FSDP 2, {ranks} ranks of {gpu}": measured(script, gpu, ranks)
            for gpu, ranks in (("RTX 4090", 8), ("RTX 3060", 4))
        }
    save("dry_run", known | {"load_average_at_start": load, "cases": cases})


if __name__ == "__main__":
    main()
