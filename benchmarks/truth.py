"""`estimate_memory` beside PyTorch's own CUDA allocator and code, over a sweep of models, and where they part.

Needs PyTorch's CUDA build; no GPU:

    python -m lightning_memtools.null_cuda --gpu "A100 80GB" benchmarks/truth.py [--only TEXT] [--part 0/2]
    python -m lightning_memtools.null_cuda --gpu "A100 80GB" benchmarks/truth.py --diff "dla34, bf16-mixed, Adam"

`--diff` lists the allocations that only one of the two makes, with their operators, the first one first. Figures of the
real allocator are kept in a file of their own (--kept), because they change with torch and not with this library.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import logging
import os
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from gpu_estimates import clean_up
from lightning.pytorch.plugins import MixedPrecision
from machine import save
from torch import nn
from torch.utils.data import DataLoader
from truth_models import OPTIMIZERS, TruthCase, cases, small_cases, step

from lightning_memtools.estimate.memory_estimate import cublas_workspace_of
from lightning_memtools.memory.allocator.allocation_trace import TraceEventKind
from lightning_memtools.memory.sizes import GpuShape, find_gpu
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.known_values import FollowedValues, values_known
from lightning_memtools.simulation.recording import AllocationRecorder
from lightning_memtools.simulation.step_runner import Recipe
from lightning_memtools.simulation.tracer import SimulationSettings, Subject, Traced, trace

STEPS = 2
GPU = "A100 80GB"
_ROUNDING = 512
Simulate = Callable[[TruthCase], tuple[dict[str, Any], list["TracedAllocation"]]]


@dataclass(frozen=True, slots=True)
class TracedAllocation:
    """One allocation of a run.

    Attributes:
        operator: Where it was made.
        size: Its bytes, rounded as the allocator does.
        allocated: What was allocated after it.
    """

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


def on_host(case: TruthCase) -> nn.Module:
    """Returns the model in host memory; weights that nobody reads take no pages."""
    model = built(case)
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
    # transformers reads the values of positions, which a device that computes nothing does not have.
    with values_known() as known, FollowedValues(known):
        if case.stage == "train":
            trainer.fit(module, _Batches(case, STEPS * case.accumulate))
        else:
            trainer.validate(module, _Batches(case, STEPS), verbose=False)


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
    subject = Subject(model=as_lightning(case, built(case)))
    settings = SimulationSettings(
        cuda=True, cublas_workspace=cublas_workspace_of(on_gpu()), gpu=GpuShape.of(find_gpu(on_gpu()))
    )
    traced = trace(subject, case.batch("cpu"), recipe_of(case), settings)
    peaks, found = _record_of(traced)
    return {**peaks, "notes": list(traced.notes), "seconds": round(time.perf_counter() - start, 2)}, found


def on_gpu() -> str:
    """The name of the GPU whose kernels the truth has."""
    return os.environ.get("TRUTH_GPU", GPU)


def _record_of(traced: Traced) -> tuple[dict[str, Any], list[TracedAllocation]]:
    """The peaks of a trace, and every allocation."""
    recorder = traced.recorder
    peaks = {"allocated": max(recorder.allocated), "reserved": max(recorder.reserved)}
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


def on_virtual_device(case: TruthCase) -> tuple[dict[str, Any], list[TracedAllocation]]:
    """The peaks of a Trainer's fit on a VirtualDevice that is like CUDA, computed by the CPU."""
    start = time.perf_counter()
    module = as_lightning(case, built(case, on_meta=False))
    device = VirtualDevice(cuda_like=True, cublas_workspace="8519680B", record=True)
    recorder = AllocationRecorder(device.allocator)
    device.listen(recorder)
    half = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(case.precision)
    module.to(half)
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    plugins: Any = [scaled] if case.precision == "16-mixed" else []
    # Made inside, the batches would count until the loader has them.
    loader: Any = DataLoader(list(_Batches(case, STEPS * case.accumulate)), batch_size=None)  # type: ignore[arg-type]
    with device:
        device.track(module)
        trainer = L.Trainer(
            accelerator="cpu", precision=None if plugins else case.precision, plugins=plugins, max_epochs=1,
            accumulate_grad_batches=case.accumulate, gradient_clip_val=case.clip, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, inference_mode=False,
        )  # fmt: skip
        (trainer.fit if case.stage == "train" else trainer.validate)(module, loader)
    traced = Traced(device, recorder)
    peaks, found = _record_of(traced)
    return {**peaks, "seconds": round(time.perf_counter() - start, 2)}, found


# --- the two side by side


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """A stretch in which the allocations are not the same.

    Attributes:
        number: Its place in the real run.
        real: The allocations that only the real run makes.
        estimated: Those that only the simulation makes.
    """

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


def show_difference(case: TruthCase, limit: int, simulate: Simulate) -> None:
    """Print the first differences of a case."""
    real, (_, estimated_trace) = real_trace(case), simulate(case)
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


def measure(
    chosen: list[TruthCase], simulate: Simulate, kept: Path, written: Path | None, seconds: float
) -> dict[str, Any]:
    """Compare the cases; those that fail are named with their error. What was found is written after each.

    Cases that were written before are not measured again, so that a sweep can run in parts.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    found: dict[str, Any] = json.loads(written.read_text()) if written is not None and written.exists() else {}
    begin = time.perf_counter()
    for case in chosen:
        start = time.perf_counter()
        if start - begin > seconds:
            break
        if case.key in found:
            continue
        try:
            real = known.get(case.key)
            if real is None:
                real = known[case.key] = real_peaks(case)
                kept.write_text(json.dumps(known))
            found[case.key] = compared(case, real, simulate)
        except Exception as error:  # noqa: BLE001, the others are still wanted
            found[case.key] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            gc.collect()
        one = found[case.key]
        if written is not None:
            written.write_text(json.dumps(found))
        print(
            f"{case.key}: {one.get('error') or (one['allocated_error_pct'], one['reserved_error_pct'])} "
            f"{one.get('causes', '')} [{time.perf_counter() - start:.1f} s]",
            flush=True,
        )
    return found


def compared(case: TruthCase, real: dict[str, int], simulate: Simulate) -> dict[str, Any]:
    """Returns both peaks, the estimate's errors, and the causes if there are any."""
    made, allocations = simulate(case)
    errors = {
        f"{name}_error_pct": round(100 * (made[name] - real[name]) / real[name], 3)
        for name in ("allocated", "reserved")
    }
    one: dict[str, Any] = {"source": case.source, "real": real, "estimated": made, **errors}
    if allocations and any(real[name] != made[name] for name in ("allocated", "reserved")):
        mine = real_trace(case)
        one["causes"] = causes(mine, allocations) or [first_other_lifetime(mine, allocations) or "the order of frees"]
    return one


# Why cases of these models differ, or why they cannot be compared.
REASONS = {
    "bilinear": "fake tensors do not show the products within aten::_trilinear",
    "topk": "the buffers of topk over several blocks, which depend on occupancy, are not simulated",
    "sort": "the indices of a segmented sort, 32 KB, are not simulated",
    "rfft": "PyTorch has no Fourier transform in bfloat16; in float32 its parts are not seen on fake tensors",
    "volo_d1_224": "the copies that im2col and col2im make of their inputs are not simulated",
    "tinynet_a": "not looked into; the result lists the operators",
    "bert": "blocks of the same sizes are freed in another order",
    "vit_small_patch16_224": "blocks of the same sizes are freed in another order",
    "deberta_v2": "numbers that the step makes on the host, such as torch.tensor(0.5), count as on the device",
}
# The same for a VirtualDevice, where functions are made of other operators on the CPU than on CUDA.
REASONS_ON_CPU = {
    "rms norm": "RMS norm is several operators on the CPU, and one on CUDA",
    "lambda_resnet26t": "cuDNN's batch norm keeps a copy of a strided input, which the CPU needs not",
    "binary cross entropy": "with logits it is several operators on the CPU, and two on CUDA",
}


def reason_of(key: str, one: dict[str, Any], *, virtual: bool) -> str | None:
    """Returns why a case differs, as far as it is known."""
    name = key.split(",", maxsplit=1)[0]
    if not virtual:
        return REASONS.get(name)
    made = " ".join(one.get("causes", []))
    if "_safe_softmax" in made:
        return "the CPU has no fused kernel for attention with dropout, or with a mask that has a gradient"
    if "_scaled_dot_product_flash_attention_for_cpu" in made:
        return "the CPU's fused kernel takes attention that CUDA's refuse, and that CUDA computes in parts"
    if "_flash_attention_forward" in made and "constant_pad_nd" in made:
        return "CUDA's flash attention takes heads whose sizes are multiples of 8, and pads others"
    older = "run before autocast followed CUDA's lists, and not since" if "mixed" in key else None
    unknown = "not looked into; the result lists the operators"
    return REASONS_ON_CPU.get(name) or REASONS.get(name) or older or unknown


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Returns how many cases are equal and how near the others come."""
    good = [one for one in found.values() if "error" not in one]
    made: dict[str, Any] = {"cases": len(found), "compared": len(good)}
    for name in ("allocated", "reserved"):
        errors = [abs(one["estimated"][name] / one["real"][name] - 1) * 100 for one in good]
        if errors:
            made[name] = {
                "equal_pct": round(100 * sum(one == 0 for one in errors) / len(errors), 1),
                "within_half_percent_pct": round(100 * sum(one <= 0.5 for one in errors) / len(errors), 1),
                "within_one_percent_pct": round(100 * sum(one <= 1 for one in errors) / len(errors), 1),
                "median_error_pct": round(statistics.median(errors), 4),
                "largest_error_pct": round(max(errors), 3),
            }
    return made


def main(description: str | None = __doc__, *, virtual: bool = False) -> int:
    """Measure, print and write results/truth.json; that of truth_virtual_device.py for `virtual`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has one of these texts, divided by |")
    parser.add_argument("--part", default="0/1", help="a part of the cases: its number and how many parts")
    parser.add_argument("--diff", metavar="CASE", help="show where one case differs")
    parser.add_argument("--limit", type=int, default=10, help="how many differences to show")
    parser.add_argument("--kept", type=Path, default=Path("logs"), help="the folder of real figures of earlier runs")
    parser.add_argument("--write", type=Path, help="write the results here and not to results/truth.json")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so long; run again to go on")
    parser.add_argument("--merge", type=Path, nargs="*", help="merge the results of parts into results/truth.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    every, simulate = (small_cases, on_virtual_device) if virtual else (cases, estimated)
    if options.merge:
        found = {key: one for path in options.merge for key, one in json.loads(path.read_text()).items()}
    elif options.diff:
        show_difference(next(case for case in every() if case.key == options.diff), options.limit, simulate)
        return 0
    else:
        part, parts = map(int, options.part.split("/"))
        chosen = [case for case in every() if any(text in case.key for text in options.only.split("|"))]
        random.Random(0).shuffle(chosen)  # noqa: S311, so that a part of the sweep is a sample of it
        kept = options.kept / ("truth_real_small.json" if virtual else "truth_real.json")
        found = measure(chosen[part::parts], simulate, kept, options.write, options.seconds)
    for key, one in found.items():
        differs = "error" in one or any(
            one["real"][name] != one["estimated"][name] for name in ("allocated", "reserved")
        )
        reason = reason_of(key, one, virtual=virtual)
        if differs and reason is not None:
            one["reason"] = reason
    print(json.dumps(summary(found), indent=1))
    if options.write:
        options.write.write_text(json.dumps(found))
    else:
        save(
            "truth_virtual_device" if virtual else "truth",
            {"gpu": on_gpu(), "steps": STEPS, "summary": summary(found), "cases": found},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
