"""What only a real GPU can say: estimates beside its allocator, what emptying its cache costs, steps with a plan.

    PYTHONPATH=.venv/zoo python benchmarks/gpu.py [PART ...]

It takes some ten minutes, at most 12 GiB of the GPU and all of it for the largest batches, and writes each part into
results/gpu.json, under the GPU's name. torchvision and timm lie in .venv/zoo; see tests/zoo.py.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from machine import known, save, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader
from truth import clean_up, errors_of, estimated, real_peaks
from truth_models import cases

from lightning_memtools import BatchSizeTuner, HaltOnNaN, default_callbacks
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.planning import StepPlanner
from lightning_memtools.simulation.tracer import StepRequest
from tests.batch_size_models import MODELS, trainer_for

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

        planner = StepPlanner(StepRequest(model=model, batch=(given,), step=loss_of))
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


# --- verdicts of `memtools run`


class Encoder(L.LightningModule):
    """Layers of a Transformer over batches of (batch, 256, width)."""

    def __init__(self, width: int, layers: int, *, waits: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, batch_first=True)
        self.net, self.waits = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), waits

    def training_step(self, batch: Tensor) -> Tensor:
        """Returns the loss; reads it if it is to wait."""
        loss: Tensor = self.net(batch).square().mean()
        if self.waits:
            loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        """Returns the fused optimizer that a GPU is used with."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class SlowBatches:
    """Sixty times the same batch, each time after this many seconds."""

    def __init__(self, batch: Tensor, seconds: float) -> None:
        self.batch, self.seconds = batch, seconds

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        if index >= len(self):
            raise IndexError
        time.sleep(self.seconds)
        return self.batch


class KernelClock(L.Callback):
    """Profiles the kernels from step 20 on, in which TrainingDoctor watches no more."""

    def __init__(self) -> None:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
        self.began = self.busy_share = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins."""
        del trainer, module, batch
        if batch_idx == 20:
            torch.cuda.synchronize()
            self.began = time.perf_counter()
            self.profiler.start()

    def on_train_end(self, *_: Any) -> None:
        """Ends."""
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        self.profiler.stop()
        events: Any = self.profiler.events()  # type: ignore[no-untyped-call]
        kernels_us = sum(event.device_time_total for event in events if event.device_type.name == "CUDA")
        self.busy_share = round(kernels_us / 1e6 / seconds, 3)


JUDGED = (
    *((64, 2, 2, 0.0, False), (128, 4, 8, 0.0, False), (256, 4, 32, 0.0, False), (256, 6, 64, 0.0, False)),
    *((512, 6, 16, 0.0, False), (512, 6, 32, 0.0, False), (512, 6, 64, 0.0, False), (1024, 6, 64, 0.0, False)),
    *((1024, 12, 64, 0.0, False), (1024, 6, 64, 0.005, False), (1024, 6, 64, 0.02, False), (1024, 6, 64, 0.2, False)),
    *((128, 2, 8, 0.05, False), (512, 6, 64, 0.0, True), (128, 4, 8, 0.0, True)),
)
"""Width, layers, batch, seconds that a batch takes, and whether each step waits."""


def fit(module: L.LightningModule, batches: Any, *callbacks: L.Callback, asked: bool = False) -> dict[str, Any]:
    """Train on the GPU; return the summary, if MEMTOOLS=1 asks for it."""
    os.environ["MEMTOOLS"] = "1" if asked else ""
    with tempfile.TemporaryDirectory() as root:
        L.Trainer(
            accelerator="cuda", devices=1, precision="bf16-mixed", max_epochs=1, callbacks=[*callbacks],
            logger=CSVLogger(root), enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, DataLoader(batches, batch_size=None))  # fmt: skip
        clean_up()
        return json.loads(next(Path(root).glob("**/summary.json")).read_text()) if asked else {}


def verdicts() -> dict[str, Any]:
    """The verdicts on fits, beside the share of the time in which the GPU has a kernel to run."""
    found: dict[str, Any] = {}
    for width, layers, batch, seconds, waits in JUDGED:
        name = f"width {width}, {layers} layers, batch {batch}" + (
            f", data takes {1000 * seconds:g} ms" * (seconds > 0)
        )
        batches = SlowBatches(torch.randn(batch, 256, width).pin_memory(), seconds)
        summary = fit(Encoder(width, layers, waits=waits), batches, asked=True)
        fit(Encoder(width, layers, waits=waits), batches, clock := KernelClock())
        facts = summary["ranks"][0]
        found[name + ", .item()" * waits] = {
            "limit": summary["verdict"]["limit"], "busy": clock.busy_share, "behind": round(facts["behind_share"], 3),
            "lead": lead_of(facts), "step_ms": round(summary["time"]["step_ms"], 3),
        }  # fmt: skip
        print(name, found[name + ", .item()" * waits], flush=True)
    return found


def lead_of(facts: dict[str, Any]) -> float | None:
    """How many times as long as the host the GPU takes for forward and backward; None where it takes no time."""
    device, host = (
        (facts[key] or {}).get("forward", 0) + (facts[key] or {}).get("backward", 0) for key in ("device_s", "host_s")
    )
    return round(device / host, 3) if device else None


def largest() -> dict[str, Any]:
    """The largest batch that a verdict names, and the largest that fits; the stubs of a dry run can say it too."""
    found: dict[str, Any] = {}
    for width, layers, batch in ((256, 6, 32), (512, 12, 64), (1024, 12, 32)):
        summary = fit(Encoder(width, layers), [torch.empty(batch, 256, width)] * 20, asked=True)
        said = summary["verdict"]["largest_batch"]
        found[f"width {width}, {layers} layers, batch {batch}"] = {"said": said, "true": maximum(width, layers, said)}
    return found


def maximum(width: int, layers: int, near: int) -> int:
    """The largest batch, to one part in 50, of which three steps fit."""

    def fits(batch: int) -> bool:
        try:
            fit(Encoder(width, layers), [torch.empty(batch, 256, width)] * 3)
        except torch.OutOfMemoryError:
            clean_up()
            return False
        return True

    low, high = 0, near
    while fits(high):
        low, high = high, int(1.2 * high)
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --- what callbacks add to a step


class StepClock(L.Callback):
    """Times the steps after the first 22, which TrainingDoctor watches, until the GPU has done them."""

    def __init__(self) -> None:
        self.began = self.step_ms = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Begins."""
        if trainer.global_step == 22:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Ends."""
        del module
        torch.cuda.synchronize()
        self.step_ms = 1000 * (time.perf_counter() - self.began) / (trainer.global_step - 22)


COSTS: dict[str, Callable[[], list[L.Callback]]] = {
    "HaltOnNaN()": lambda: [HaltOnNaN()],
    "default_callbacks()": default_callbacks,
    "`memtools run`": list,
}


def costs() -> dict[str, Any]:
    """The time of a step with callbacks, as a multiple of that of the plain fits before and after."""
    found: dict[str, Any] = {}
    for width, layers, batch, n_steps in ((128, 4, 8, 100), (512, 6, 32, 60), (1024, 12, 64, 30)):
        batches = [torch.randn(batch, 256, width).pin_memory()] * (22 + n_steps)

        def step_ms(*callbacks: L.Callback, asked: bool = False) -> float:
            fit(Encoder(width, layers), batches, *callbacks, clock := StepClock(), asked=asked)  # noqa: B023
            return clock.step_ms

        step_ms()  # the first one loads kernels
        bare, ratios = [step_ms()], {name: list[float]() for name in COSTS}
        for _ in range(3):
            for name, make in COSTS.items():
                with_it = step_ms(*make(), asked=name == "`memtools run`")
                bare.append(step_ms())
                ratios[name].append(with_it / statistics.mean(bare[-2:]))
        found[f"width {width}, {layers} layers, batch {batch}"] = {"bare_step_ms": spread(bare)} | {
            name: spread(ratio) for name, ratio in ratios.items()
        }
    return found


def searches() -> dict[str, Any]:
    """The batch sizes that BatchSizeTuner finds in a part of the device, and how 50 steps with them end."""
    found: dict[str, Any] = {}
    for name in ("dropout", "batchnorm", "checkpointing", "attention", "workspace", "many weights"):
        for gib in (2, 4):
            torch.cuda.set_per_process_memory_fraction(gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
            model, tuner, outcome = MODELS[name](), BatchSizeTuner(stages=("train",)), "fits"
            with tempfile.TemporaryDirectory() as root:
                run = trainer_for(
                    type(model), root, tuner, max_steps=50, limit_val_batches=0, accelerator="cuda", devices=1
                )
                try:
                    run.fit(model)
                except torch.OutOfMemoryError:
                    outcome = f"out of memory in step {run.global_step}"
            found[f"{name}, {gib} GiB"] = {"size": model.batch_size, "outcome": outcome}
            del model, run, tuner
            clean_up()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return found


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    part.__name__: part for part in (estimates, asking, plans, verdicts, largest, costs, searches)
}


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
