"""Out-of-memory reports of a real GPU: their advice followed, their time, and the pages themselves as examples.

Needs a CUDA device, of which it takes at most 4 GiB; made to take under 2 minutes. Run by benchmarks/gpu.py, or alone:

    python benchmarks/gpu_oom.py

Writes results/gpu_oom-<gpu>.json, and the reports to docs/reports/.
"""

from __future__ import annotations

import gc
import logging
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from machine import save
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_memtools import OOMReport

LIMIT = 4 * 2**30
REPORTS = Path(__file__).parents[1] / "docs" / "reports"
WIDTH, LENGTH, WORDS = 512, 256, 8000


class LanguageModel(L.LightningModule):
    """Eight transformer blocks."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 8, batch_first=True, norm_first=True) for _ in range(8)]
        self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, WORDS)
        self.sizes = sizes

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embedding(batch))).argmax(-1)
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def loader(self, stage: str) -> Any:
        tokens: Any = torch.zeros(2 * self.sizes[stage], LENGTH, dtype=torch.long)
        return DataLoader(tokens, batch_size=self.sizes[stage])

    def train_dataloader(self) -> Any:
        return self.loader("train")

    def val_dataloader(self) -> Any:
        return self.loader("val")

    def predict_dataloader(self) -> Any:
        return self.loader("predict")


CASES = {
    "training": ("fit", "train", {"train": 160, "val": 8, "predict": 8}),
    "validation": ("fit", "val", {"train": 16, "val": 640, "predict": 8}),
    "prediction": ("predict", "predict", {"train": 8, "val": 8, "predict": 900}),
}


def attempt(call: str, sizes: dict[str, int]) -> tuple[str | None, float]:
    """The report of a run that fails, None of one that fits; and the seconds it took."""
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="gpu", devices=1, max_epochs=1, logger=False, default_root_dir=folder,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            callbacks=[OOMReport(directory=folder)],
        )  # fmt: skip
        begin = time.perf_counter()
        try:
            getattr(trainer, call)(LanguageModel(sizes))
        except torch.OutOfMemoryError:
            text = next(Path(folder).glob("oom-*.md")).read_text()
            return text.replace(folder, "."), time.perf_counter() - begin
    return None, time.perf_counter() - begin


def examine(name: str) -> dict[str, Any]:
    """One failure: what its report says, and what became of its advice."""
    call, key, sizes = CASES[name]
    report, seconds = attempt(call, sizes)
    if report is None:
        return {"fits": True, "seconds": seconds}
    slug = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / f"{slug}-{name}.md").write_text(report)
    found = re.search(rf"batches of (\d+) instead of {sizes[key]}", report)
    took = re.search(r"This report took ([\d.]+) s", report)
    result: dict[str, Any] = {
        "headline": report.splitlines()[0],
        "report_s": float(took[1]) if took else None,
        "suggested": int(found[1]) if found else None,
    }
    if found:
        for label, size in (("suggested_fits", int(found[1])), ("next_fits", int(found[1]) + 1)):
            result[label] = attempt(call, sizes | {key: size})[0] is None
        # How far the suggestion is from the truth, by steps of 2%.
        size = int(found[1])
        while attempt(call, sizes | {key: size})[0] is None and size < 2 * int(found[1]):
            size += max(size // 50, 1)
        result["first_that_fails"] = size
    return result


def measure() -> dict[str, Any]:
    """All failures, with the process held to 4 GiB."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(0).total_memory)
    try:
        return {"limit": LIMIT, "cases": {name: examine(name) for name in CASES}}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> int:
    if not torch.cuda.is_available():
        print("benchmarks/gpu_oom.py makes reports of a real GPU, and there is no CUDA device here: nothing measured.")
        return 1
    slug = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    save(f"gpu_oom-{slug}", measure())
    return 0


if __name__ == "__main__":
    sys.exit(main())
