"""What MemoryMonitor and LossCurves cost: a logged step and a step that is not logged.

A logged step is compared with its irreducible parts: one reading of the statistics and of the process's host memory,
and bare logging of as many scalars. It stands beside Lightning's DeviceStatsMonitor, on statistics of CUDA's shape (122
keys), in one run. The CUDA reader itself runs, over a dictionary as torch.cuda returns it; only the two driver calls
under it are replaced, on a machine without a GPU. Host memory is read from a file in /proc, which takes most of a
millisecond to open in some sandboxes.

    python benchmarks/callbacks.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from machine import interleaved, save, spread

from lightning_memtools import LossCurves, MemoryMonitor, VirtualDevice, default_callbacks
from lightning_memtools.callbacks import memory_monitor
from lightning_memtools.memory.readers import CudaReader, host_rss_bytes
from lightning_memtools.reporting.loggers import log_scalars

GIB = 2**30
FIGURES = ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
           "inactive_split_bytes", "requested_bytes")  # fmt: skip


def nested_statistics() -> dict[str, Any]:
    """What torch._C._cuda_memoryStats returns, made anew at each call as torch does."""
    per_pool = {
        figure: {pool: {"current": GIB, "peak": 2 * GIB, "allocated": 3 * GIB, "freed": GIB}
                 for pool in ("all", "small_pool", "large_pool")}
        for figure in FIGURES
    }  # fmt: skip
    counters = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    return {**per_pool, "oversize_allocations": dict(counters), "oversize_segments": dict(counters),
            "num_alloc_retries": 0, "num_ooms": 0, "num_sync_all_streams": 0, "num_device_alloc": 5,
            "num_device_free": 2, "max_split_size": -1}  # fmt: skip


def flat_statistics() -> dict[str, Any]:
    """The same as torch.cuda.memory_stats gives it to DeviceStatsMonitor: flattened and sorted."""
    flat: list[tuple[str, Any]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}{key}.", inner)
        else:
            flat.append((prefix[:-1], value))

    walk("", nested_statistics())
    return dict(sorted(flat))


class FakeCudaReader(CudaReader):
    """CudaReader without a device: everything but the driver."""

    def __init__(self) -> None:
        self.index = 0
        self.name = "cuda:0 (statistics of CUDA's shape)"

    def reset_peaks(self) -> None:
        """The driver's own cost is not ours."""

    def summary(self) -> str:
        return ""


def per_call_us(call: Callable[[], object], calls: int = 200) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - begin) / calls


class Measure(L.Callback):
    """Times hooks of the other callbacks in the middle of a real training run."""

    def __init__(self, ours: MemoryMonitor, curves: LossCurves, theirs: DeviceStatsMonitor, repeats: int) -> None:
        self.ours, self.curves, self.theirs, self.repeats = ours, curves, theirs, repeats
        self.logged: dict[str, list[float]] = {}
        self.unlogged: dict[str, list[float]] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loop = trainer.fit_loop.epoch_loop
        reader = FakeCudaReader()
        run = self.ours._running()
        scalars: dict[str, float] = {}
        run.add_training_point(0, lambda found, _step: scalars.update(found))
        per_step: list[Callable[[Any], None]] = [
            lambda c: c.on_train_batch_start(trainer, pl_module, batch, batch_idx),
            lambda c: c.on_before_backward(trainer, pl_module, outputs["loss"]),
            lambda c: c.on_after_backward(trainer, pl_module),
            lambda c: c.on_before_optimizer_step(trainer, pl_module, trainer.optimizers[0]),
            lambda c: c.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx),
        ]

        def whole_step(callback: L.Callback) -> Callable[[], None]:
            def step() -> None:
                for hook in per_step:
                    hook(callback)

            return step

        def reading_and_logging() -> None:
            reader.stats()
            host_rss_bytes()
            log_scalars(trainer, scalars, 0)

        loop._batches_that_stepped = 49  # the fiftieth step is logged
        self.logged = interleaved(
            {
                "one reading": lambda: per_call_us(reader.stats),
                "one reading of host memory": lambda: per_call_us(host_rss_bytes),
                "both readings and bare logging of as many scalars": lambda: per_call_us(reading_and_logging),
                "MemoryMonitor": lambda: per_call_us(whole_step(self.ours)),
                "LossCurves": lambda: per_call_us(whole_step(self.curves)),
                "DeviceStatsMonitor": lambda: per_call_us(whole_step(self.theirs)),
            },
            self.repeats,
        )
        loop._batches_that_stepped = 10
        self.unlogged = interleaved(
            {
                "MemoryMonitor": lambda: per_call_us(whole_step(self.ours), 1000),
                "LossCurves": lambda: per_call_us(whole_step(self.curves), 1000),
                "DeviceStatsMonitor": lambda: per_call_us(whole_step(self.theirs), 1000),
                "a callback without hooks": lambda: per_call_us(whole_step(L.Callback()), 1000),
            },
            self.repeats,
        )
        loop._batches_that_stepped = 0


def fit_seconds(root: str, callbacks: list[L.Callback]) -> float:
    """A fit of one step: what a callback adds here, it adds to the start and the end of every run."""
    begin = time.perf_counter()
    L.Trainer(accelerator="cpu", default_root_dir=root, max_steps=1, limit_val_batches=1,
              enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
              callbacks=callbacks).fit(BoringModel())  # fmt: skip
    return time.perf_counter() - begin


def main() -> None:
    with tempfile.TemporaryDirectory() as root, VirtualDevice("24GiB"):
        fits = interleaved(
            {
                "without callbacks": lambda: fit_seconds(root, []),
                "default_callbacks()": lambda: fit_seconds(root, default_callbacks()),
            },
            repeats=8,
        )
    reader = FakeCudaReader()
    with (
        tempfile.TemporaryDirectory() as root,
        mock.patch.object(memory_monitor, "reader_for", return_value=reader),
        mock.patch("torch.cuda.mem_get_info", return_value=(2 * GIB, 8 * GIB)),
        mock.patch("torch.cuda.memory_stats_as_nested_dict", side_effect=lambda _index: nested_statistics()),
        mock.patch.object(CPUAccelerator, "get_device_stats", side_effect=lambda *_: flat_statistics()),
    ):
        ours, curves, theirs = MemoryMonitor(), LossCurves(), DeviceStatsMonitor()
        measure = Measure(ours, curves, theirs, repeats=15)
        L.Trainer(accelerator="cpu", default_root_dir=root, max_steps=1, limit_val_batches=0,
                  enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
                  callbacks=[ours, curves, theirs, measure]).fit(BoringModel())  # fmt: skip
    bare = measure.logged["both readings and bare logging of as many scalars"]
    ratios = [ours_us / bare_us for ours_us, bare_us in zip(measure.logged["MemoryMonitor"], bare, strict=True)]
    save(
        "callbacks",
        {
            "what": "microseconds of host time per training step, all hooks; statistics of 122 keys",
            "logged_step_us": {name: spread(samples) for name, samples in measure.logged.items()},
            "unlogged_step_us": {name: spread(samples) for name, samples in measure.unlogged.items()},
            "MemoryMonitor_logged_over_bare": {**spread(ratios), "target": 1.5},
            "fit_of_one_step_s": {**{name: spread(samples) for name, samples in fits.items()}, "target_added": 1.0},
            "n_statistics": len(flat_statistics()),
        },
    )


if __name__ == "__main__":
    main()
