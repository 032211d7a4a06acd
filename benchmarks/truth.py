"""`estimate_memory` beside PyTorch's own CUDA allocator and code, over a sweep of models.

Needs PyTorch's CUDA build; no GPU:

    python -m lightning_memtools.null_cuda --gpu "A100 80GB" benchmarks/truth.py
    python -m lightning_memtools.null_cuda benchmarks/truth.py --gpus
    python -m lightning_memtools.null_cuda --gpu "A100 80GB" benchmarks/truth.py --diff "dla34, bf16-mixed, Adam"

`--gpus` runs a handful of models on the kernels of every known GPU, each in a process of its own. `--diff` lists the
allocations of one case that only one side makes, with their operators. Every case is kept in logs/ as it ends, so that
a sweep that was stopped goes on; results/truth.json gets the summary of a whole sweep. `--every 6` takes a sixth of it.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from machine import save
from torch import nn
from truth_models import OPTIMIZERS, TruthCase, cases, step

from lightning_memtools.memory.allocator.allocation_trace import TraceEventKind
from lightning_memtools.memory.sizes import find_gpu, known_gpus
from lightning_memtools.simulation.followed_functions import FollowedValues
from lightning_memtools.simulation.known_values import values_known
from lightning_memtools.simulation.step_runner import Recipe
from lightning_memtools.simulation.tracer import StepRequest, Traced, trace

STEPS = 2
GPU = "A100 80GB"
_ROUNDING = 512
FIGURES = ("allocated", "reserved")
ON_EVERY_GPU = (
    "resnet50, bf16-true, AdamW, channels last",
    "resnet34, 16-mixed, Adam",
    "vit_small_patch16_224, bf16-mixed, AdamW, clip 1",
    "gpt2, bf16-true, AdamW",
    "llama, bf16-mixed, Adam, accumulate 2",
    "roberta, 32-true, SGD",
)


@dataclass(frozen=True, slots=True)
class TracedAllocation:
    """One allocation: the operator that made it, its rounded bytes, and what was allocated after it."""

    operator: str
    size: int
    allocated: int

    def __str__(self) -> str:
        """Returns it for a list."""
        return f"{self.operator} {self.size}"


# --- the real allocator


class Trained(L.LightningModule):
    """A case's model and step as a LightningModule, which a Trainer and an estimate run alike."""

    def __init__(self, case: TruthCase, model: nn.Module) -> None:
        super().__init__()
        self.case, self.model = case, model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the loss, and logs it."""
        del batch_idx
        loss = step(self.model, batch)
        self.log("loss", loss, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the loss."""
        del batch_idx
        self.log("val_loss", step(self.model, batch), batch_size=1)

    def configure_optimizers(self) -> Any:
        """Returns the case's optimizer."""
        return OPTIMIZERS[self.case.optimizer](list(self.parameters()))


class TrainedManually(Trained):
    """The same with manual optimization."""

    def __init__(self, case: TruthCase, model: nn.Module) -> None:
        super().__init__(case, model)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Steps the optimizer itself."""
        optimizer: Any = self.optimizers()
        self.toggle_optimizer(optimizer)
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


def as_lightning(case: TruthCase, model: nn.Module) -> Trained:
    """Returns the LightningModule of a case."""
    return (TrainedManually if case.manual else Trained)(case, model)


def computes() -> bool:
    """Whether the device is a real GPU."""
    return not torch.cuda.get_device_name().endswith("(dry run)")


def on_host(case: TruthCase) -> nn.Module:
    """Returns the model in host memory; weights that nobody reads take no pages."""
    model = built(case, on_meta=not computes())
    known = {id(one): one for one in (*model.parameters(), *model.buffers())}
    shared = {name: id(one) for name, one in model.named_parameters(remove_duplicate=False)}
    if any(one.is_meta for one in known.values()):
        model = model.to_empty(device="cpu")
        first: dict[int, nn.Parameter] = {}
        for name, identity in shared.items():  # to_empty unties what is tied
            owner, _, last = name.rpartition(".")
            if identity in first:
                setattr(model.get_submodule(owner), last, first[identity])
            else:
                first[identity] = model.get_parameter(name)
    return model


def built(case: TruthCase, *, on_meta: bool = True) -> nn.Module:
    """Returns the model on meta; on the host, if it cannot be built there."""
    torch.manual_seed(0)
    model = _on_meta(case.build) if on_meta else None
    if model is None:
        model = case.build()
    model.train(case.stage == "train")
    return model.to(memory_format=torch.channels_last) if case.channels_last else model  # type: ignore[call-overload]


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module | None:
    try:
        with torch.device("meta"):
            model = build()
    except (RuntimeError, NotImplementedError, ValueError):  # it reads values
        return None
    return model if all(one.is_meta for one in (*model.parameters(), *model.buffers())) else None


class _Batches:
    """A loader of batches of zeros."""

    def __init__(self, case: TruthCase, length: int) -> None:
        self.case, self.length = case, length

    def __len__(self) -> int:
        """Returns the number of batches."""
        return self.length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields them."""
        return (self.case.batch("cpu") for _ in range(self.length))


class EndOfSteps(L.Callback):
    """Counts the entries of the recorded history at the end of the last step; an epoch's end copies what was logged."""

    n_entries = 0

    def on_train_batch_end(self, *_: Any, **_named: Any) -> None:
        """Counts them."""
        self.n_entries = len(torch.cuda.memory._snapshot()["device_traces"][0])

    on_validation_batch_end = on_train_batch_end


def run(case: TruthCase, *callbacks: L.Callback) -> None:
    """A Trainer's own fit, or its validation."""
    trainer = L.Trainer(
        callbacks=list(callbacks),
        accelerator="cuda", devices=1, precision=case.precision, max_epochs=1, accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = as_lightning(case, on_host(case))
    with ExitStack() as stack:
        if not computes():  # transformers reads the values of positions, which such a device does not have
            stack.enter_context(FollowedValues(stack.enter_context(values_known())))
        if case.stage == "train":
            trainer.fit(module, _Batches(case, STEPS * case.accumulate))
        else:
            trainer.validate(module, _Batches(case, STEPS), verbose=False)


def clean_up() -> None:
    """Drop what earlier runs left: garbage, cuBLAS workspaces, cached blocks."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def real_peaks(case: TruthCase) -> dict[str, int]:
    """Peaks of PyTorch's own allocator from a clean start."""
    clean_up()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() == 0, "something else holds memory of this process"
    run(case)
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    gc.collect()
    return found


def real_trace(case: TruthCase) -> list[TracedAllocation]:
    """Every allocation of PyTorch's own allocator, with the operator that the profiler saw it in.

    A dispatch mode would name the operators too, but under one torch takes other paths (composed operators call their
    parts through the mode, and sums of gradients are not in place), and so it allocates otherwise.
    """
    clean_up()
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(case, end := EndOfSteps())
    entries = torch.cuda.memory._snapshot()["device_traces"][0][: end.n_entries]
    torch.cuda.memory._record_memory_history(enabled=None)
    gc.collect()
    seen: list[tuple[int, str]] = []
    _collect(profiler.profiler.kineto_results.experimental_event_tree(), "?", seen)
    operators = [operator for _, operator in sorted(seen, key=itemgetter(0))]
    found: list[TracedAllocation] = []
    allocated = 0
    for entry in entries:
        size = -(-entry["size"] // _ROUNDING) * _ROUNDING
        if entry["action"] == "alloc":
            allocated += size
            found.append(TracedAllocation(operators[len(found)], size, allocated))
        elif entry["action"] == "free_completed":
            allocated -= size
    return found


# Operators that only make the tensor which the operator around them asked for.
_MAKERS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::resize_", "aten::new_empty"}


def _collect(events: Any, operator: str, seen: list[tuple[int, str]]) -> None:
    for event in events:
        if event.tag.name == "Allocation":
            if event.extra_fields.device.type == "cuda" and event.extra_fields.alloc_size > 0:
                seen.append((event.start_time_ns, operator))
            continue
        is_operator = event.tag.name == "TorchOp" and not (event.name in _MAKERS and operator != "?")
        _collect(event.children, event.name if is_operator else operator, seen)


# --- the simulation


def recipe_of(case: TruthCase) -> Recipe:
    """The settings of the estimate's loop."""
    return Recipe(
        stage=case.stage,  # type: ignore[arg-type]
        precision=case.precision,
        steps=STEPS,
        accumulate=case.accumulate,
        clip=case.clip,
    )


def estimated(case: TruthCase) -> tuple[dict[str, Any], list[TracedAllocation]]:
    """The estimate of the same steps, and every allocation of the simulation."""
    start = time.perf_counter()
    model = as_lightning(case, built(case))
    traced = trace(StepRequest(model=model, batch=case.batch("cpu"), recipe=recipe_of(case), capacity=on_gpu()))
    peaks, found = _record_of(traced)
    return {**peaks, "notes": list(traced.notes), "seconds": round(time.perf_counter() - start, 2)}, found


def on_gpu() -> str:
    """The known GPU whose kernels run: the present device's, or one with as large a cuBLAS workspace."""
    with suppress(ValueError):
        if gpu := find_gpu(torch.cuda.get_device_name().removesuffix(" (dry run)")):
            return gpu.name
    return "H100 80GB" if torch.cuda.get_device_capability()[0] >= 9 else GPU


def _record_of(traced: Traced) -> tuple[dict[str, Any], list[TracedAllocation]]:
    """The peaks of a trace, and every allocation."""
    recorder = traced.recorder
    peaks = {"allocated": max(recorder.allocated), "reserved": traced.device.stats().peak_reserved}
    found: list[TracedAllocation] = []
    sizes: dict[int, int] = {}
    allocated = 0
    assert traced.device.trace is not None
    for kind, number in traced.device.trace.events():
        if kind == TraceEventKind.MALLOC:
            one = recorder.allocations[len(found) + 1]
            size = sizes[len(found) + 1] = -(-number // _ROUNDING) * _ROUNDING
            allocated += size
            found.append(TracedAllocation(str(one.operation or one.phase), size, allocated))
        elif kind == TraceEventKind.FREE:
            allocated -= sizes[number]
    return peaks, found


# --- the two side by side


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """A stretch in which the allocations differ: its place in the real run, and what only one of the two makes."""

    number: int
    real: list[TracedAllocation]
    estimated: list[TracedAllocation]


def differences(real: list[TracedAllocation], estimated: list[TracedAllocation]) -> list[TraceDifference]:
    """Returns where two runs allocate other sizes, in the order of the real one."""
    matcher = difflib.SequenceMatcher(None, [one.size for one in real], [one.size for one in estimated], autojunk=False)
    return [
        TraceDifference(i, real[i:j], estimated[k:m]) for kind, i, j, k, m in matcher.get_opcodes() if kind != "equal"
    ]


def first_other_lifetime(real: list[TracedAllocation], estimated: list[TracedAllocation]) -> str | None:
    """Returns the first allocation of equal size after which not as much is allocated: another was freed otherwise."""
    matcher = difflib.SequenceMatcher(None, [one.size for one in real], [one.size for one in estimated], autojunk=False)
    offset = 0
    for i, j, n in matcher.get_matching_blocks():
        for index in range(n):
            mine, other = real[i + index], estimated[j + index]
            if other.allocated - mine.allocated != offset:
                before = real[i + index - 1] if i + index else mine
                return (
                    f"at allocation {i + index}, {mine} (after {before}), the estimate has "
                    f"{other.allocated - mine.allocated - offset:+} B, so something lives longer or shorter"
                )
    return None


def causes(real: list[TracedAllocation], estimated: list[TracedAllocation]) -> list[str]:
    """Returns the operators whose allocations differ, with how often, the most bytes first."""
    counted: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for one in differences(real, estimated):
        for side, name in ((one.real, "real only"), (one.estimated, "estimate only")):
            for allocation in side:
                key = f"{allocation.operator} ({name})"
                counted[key] = max(counted[key], allocation.size)
                times[key] += 1
    return [f"{name}: {times[name]} times, up to {size} B" for name, size in counted.most_common(8)]


def show_difference(case: TruthCase, limit: int) -> None:
    """Print the first differences of a case."""
    real, (_, estimated_trace) = real_trace(case), estimated(case)
    found = differences(real, estimated_trace)
    print(f"{case.key}: {len(real)} real allocations, {len(estimated_trace)} estimated, {len(found)} differences")
    print("peaks:", max(one.allocated for one in real), max(one.allocated for one in estimated_trace))
    for one in found[:limit]:
        print(f"  at {one.number}, after {real[one.number - 1] if one.number else 'the start'}")
        print("    real only:     ", ", ".join(map(str, one.real)) or "-")
        print("    estimate only: ", ", ".join(map(str, one.estimated)) or "-")
    print("first other lifetime:", first_other_lifetime(real, estimated_trace))
    for line in causes(real, estimated_trace):
        print("  cause:", line)


# --- the sweep


def measure(chosen: list[TruthCase], kept: Path) -> dict[str, Any]:
    """Compare the cases that were not kept before; those that fail are named with their error."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for case in chosen:
        if case.key in found:
            continue
        start = time.perf_counter()
        try:
            found[case.key] = compared(case)
        except Exception as error:  # noqa: BLE001, the others are still wanted
            found[case.key] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            gc.collect()
        kept.write_text(json.dumps(found))
        one = found[case.key]
        print(f"{case.key}: {one.get('error') or errors_of(one)} {one.get('causes', '')} "
              f"[{time.perf_counter() - start:.1f} s]", flush=True)  # fmt: skip
    return {case.key: found[case.key] for case in chosen}


def compared(case: TruthCase) -> dict[str, Any]:
    """Returns both peaks, and the causes of a difference."""
    real = real_peaks(case)
    made, allocations = estimated(case)
    one: dict[str, Any] = {"real": real, "estimated": made}
    if allocations and any(errors_of(one)):
        mine = real_trace(case)
        one["causes"] = causes(mine, allocations) or [first_other_lifetime(mine, allocations) or "the order of frees"]
    return one


def errors_of(one: dict[str, Any]) -> list[float]:
    """Returns how far the estimate of a case is off in percent, of allocated and of reserved memory."""
    return [100 * (one["estimated"][name] - one["real"][name]) / one["real"][name] for name in FIGURES]


# Why cases of these models differ, or why they cannot be compared.
REASONS = {
    "block used 6 times": "a linear layer adds its bias in place to the product of a strided input",
    "davit_tiny": "a convolution copies weights and inputs into cuDNN's memory format",
    "bloom": "sums in a Python function's backward pass for sums of gradients",
    "deeplabv3_mobilenet_v3_large": "batch norm in channels last, without cuDNN, leaves parts of its sums",
    "vgg16_bn": "batch norm in channels last, without cuDNN, leaves parts of its sums",
    "bilinear": "fake tensors do not show the products within aten::_trilinear",
    "embedding many": "the gradient of an embedding sorts its indices",
    "embedding bag": "the gradient of an embedding sorts its indices",
    "cdist": "workspaces of losses and distances are not simulated",
    "smooth l1": "workspaces of losses and distances are not simulated",
    "topk": "buffers of topk are not simulated",
    "sort": "the indices of a segmented sort, 32 KB, are not simulated",
    "rfft": "the parts of a Fourier transform are not seen on fake tensors",
    "volo_d1_224": "copies by im2col and col2im are not simulated",
    "bert": "blocks of the same sizes are freed in another order",
    "vit_small_patch16_224": "blocks of the same sizes are freed in another order",
    "deberta_v2": "numbers made on the host count as on the device",
}


def reason_of(key: str) -> str:
    """Returns why a case differs, as far as it is known."""
    return REASONS.get(key.split(",", maxsplit=1)[0], "not looked into")


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Returns how many cases are equal, how near the others come, and why they differ."""
    good = {key: errors_of(one) for key, one in found.items() if "error" not in one}
    made: dict[str, Any] = {"cases": len(found), "models": len({key.split(",")[0] for key in found}),
                            "compared": len(good)}  # fmt: skip
    for at, name in enumerate(FIGURES):
        errors = [abs(one[at]) for one in good.values()]

        def share(most: float, errors: list[float] = errors) -> float:
            return round(100 * sum(error <= most for error in errors) / len(errors), 1)

        made[name] = {
            "equal_pct": share(0),
            "within_half_percent_pct": share(0.5),
            "within_one_percent_pct": share(1),
            "median_error_pct": round(statistics.median(errors), 4),
            "largest_error_pct": round(max(errors), 3),
        }
    different = {
        key: {"reason": one.get("error") or reason_of(key)}
        | {f"{name}_error_pct": round(error, 3) for name, error in zip(FIGURES, good.get(key, ()), strict=False)}
        for key, one in found.items()
        if "error" in one or any(good[key])
    }
    return {**made, "different": different}


def on_every_gpu(folder: Path) -> dict[str, Any]:
    """Runs the cases on each known GPU's kernels in a process of its own, and returns how near the estimates come."""
    different: dict[str, Any] = {}
    errors: list[list[float]] = []
    for gpu in known_gpus():
        command = [sys.executable, "-m", "lightning_memtools.null_cuda", "--gpu", gpu.name, __file__]
        command += ["--only", "|".join(ON_EVERY_GPU), "--logs", str(folder / gpu.name)]
        subprocess.run(command, check=True, timeout=1800)
        found = json.loads((folder / gpu.name / "truth.json").read_text())
        near = {key: errors_of(found[key]) for key in ON_EVERY_GPU if "error" not in found[key]}
        errors += near.values()
        off = {key: [round(error, 3) for error in pair] for key, pair in near.items() if any(pair)}
        different |= {gpu.name: off} if off else {}
    return summary_of_gpus(errors, different)


def summary_of_gpus(errors: list[list[float]], different: dict[str, Any]) -> dict[str, Any]:
    """Returns how many of the peaks on all GPUs are equal, and those that differ."""
    made: dict[str, Any] = {"gpus": len(known_gpus()), "cases": list(ON_EVERY_GPU), "compared": len(errors)}
    for at, name in enumerate(FIGURES):
        off = [abs(pair[at]) for pair in errors]
        made[name] = {"equal": sum(one == 0 for one in off), "largest_error_pct": round(max(off), 3)}
    return {**made, "different": different}


def main() -> int:
    """Measure, print and write a section of results/truth.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", action="store_true", help="compare estimates on every known GPU")
    parser.add_argument("--only", help="cases whose name has one of these texts, divided by |; no summary is written")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th case; then no summary is written")
    parser.add_argument("--diff", metavar="CASE", help="show where one case differs")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="the folder of the cases that ended")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.diff:
        show_difference(next(case for case in cases() if case.key == options.diff), 10)
        return 0
    if options.gpus:
        save("truth", on_every_gpu(options.logs), section="gpus")
        return 0
    chosen = [case for case in cases() if any(text in case.key for text in (options.only or "").split("|"))]
    chosen = chosen[:: options.every]
    made = summary(measure(chosen, options.logs / "truth.json"))
    if options.only is None and options.every == 1:
        save("truth", {"gpu": on_gpu(), "steps": STEPS, **made}, section="simulation")
    else:
        print(json.dumps(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
