"""Dry runs of litgpt's own fine-tuning scripts, beside the peaks that litgpt published of a real A10G.

Needs a CUDA build of PyTorch, no GPU (docs/dry-run.md), and litgpt's source as it was when it published the table:
    git clone https://github.com/Lightning-AI/litgpt && git -C litgpt checkout 00af8b0d9b43eaa3f8c812e3e8bd53ef38cbb49d
    .venv-cuda/bin/python -m lightning_memtools.null_cuda benchmarks/litgpt.py litgpt
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from machine import save

from lightning_memtools import dry_run

SCRIPT = Path(__file__).with_name("litgpt_finetune.py")
COMMIT = "00af8b0d9b43eaa3f8c812e3e8bd53ef38cbb49d"
_OUT_OF_MEMORY = 3  # a dry run's status


def published(configs: Path) -> dict[str, float | None]:
    """Return each config's published peak in GB of 1e9 bytes, None where it ran out of memory, as the README has them.

    A config that was run on one and on four GPUs has one peak: its file says how many devices it takes.
    """
    found: dict[str, float | None] = {}
    for line in (configs / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].endswith(("/full.yaml", "/lora.yaml")):  # qlora needs bitsandbytes, whose kernels are its own
            peak = None if cells[8] == "OOM" else float(cells[8].removesuffix(" GB"))
            # The README writes llama-3.2-1b where the folder is llama-3.2-1B.
            (config,) = (one for one in configs.glob("*/*.yaml") if f"{one.parent.name}/{one.name}".lower() == cells[0])
            name = f"{config.parent.name}/{config.name}"
            if found.setdefault(name, peak) != peak:
                raise ValueError(f"{name}: the README gives {found[name]} and {peak}.")
    return found


def measured(source: Path, config: str, peak_gb: float | None) -> dict[str, Any]:
    """One dry run of a config on as many A10G as its file says, every batch as long as it allows."""
    wanted = yaml.safe_load((source / "config_hub" / "finetune" / config).read_text(encoding="utf-8"))
    devices, train = wanted["devices"], wanted["train"]
    arguments = [str(source), config, str(devices), str(train["max_seq_length"])]
    result = dry_run(SCRIPT, arguments, gpu="A10G 24GB", devices=devices, output=sys.stderr)
    (stage,) = result.stages
    # The weights and AdamW's two averages, which are all of the weights' type.
    least = 3 * stage.bytes_by_category["parameters"] if config.endswith("full.yaml") else 0
    return {
        "devices": devices,
        "micro_batch_size": train["micro_batch_size"],
        "published_gb": peak_gb,
        "comparable": peak_gb is None or devices > 1 or least <= peak_gb * 1e9,
        "dry_run_gb": None if result.status == _OUT_OF_MEMORY else round(stage.peak_allocated_bytes / 1e9, 4),
        "error_pct": peak_gb and round(100 * (stage.peak_allocated_bytes / 1e9 / peak_gb - 1), 2),
    }


def summary(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return how many verdicts are right, how near the peaks come, and every config."""
    comparable = [one for one in cases.values() if one["comparable"]]
    errors = [abs(one["error_pct"]) for one in comparable if one["published_gb"] is not None]
    return {
        "gpu": "A10G 24GB",
        "litgpt": COMMIT,
        "configs": len(cases),
        "comparable": len(comparable),
        "right_verdicts": sum((one["published_gb"] is None) == (one["dry_run_gb"] is None) for one in comparable),
        "out_of_memory": sum(one["published_gb"] is None for one in comparable),
        "peaks": len(errors),
        "within_0.2_pct": sum(error <= 0.2 for error in errors),
        "worst_error_pct": max(errors),
        "cases": cases,
    }


def main() -> None:
    """Measure, print and write results/litgpt.json."""
    source = Path(sys.argv[1]).resolve()
    rows = published(source / "config_hub" / "finetune")
    save("litgpt", summary({config: measured(source, config, peak) for config, peak in rows.items()}))


if __name__ == "__main__":
    main()
