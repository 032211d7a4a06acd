"""Measures what gradient checkpointing saves and costs: simulated peaks, operations, and the time of planning.

Everything here is traced on fake tensors in the simulated allocator, with CUDA's operators. Except for the times, the
figures are the same on every machine. Writes results/checkpointing.json and docs/gradient-checkpointing.svg.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpointing_frontier import frontiers, picture
from checkpointing_models import Plans, encoder, flops, step_of
from checkpointing_switches import MODELS, Case, figures, llama_1b, lowest_within
from machine import RESULTS, interleaved, save
from torch import nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions, LossHead, Offload
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.planning import MOST_OPERATIONS, StepPlanner, plan_checkpoints
from lightning_memtools.checkpointing.step_profile import predict
from lightning_memtools.memory.cuda_ops.functions import CudaFunctions
from lightning_memtools.memory.sizes import GpuShape, parse_size
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.fakes import TensorExchange, borrowed, fake_mode
from lightning_memtools.simulation.step_trace import StepCost, TracedStep
from tests.zoo import timm, torchvision_models

DOCS = Path(__file__).parents[1] / "docs"
# Large enough that activations are most of what there is, also of the planned step: there a larger batch is wanted.
HEADLINE_BATCH = 256


def headline(dropout: float, activation: str, *, budget: float | None = None, batch: int = 256) -> dict[str, Any]:
    """A plan for one batch size, and what it saves per sample: the difference between this batch and twice as many."""
    model = encoder(48, dropout, activation)
    planner = StepPlanner(step_of(model, (batch, 128, 256), adamw=True))
    plan = planner.plan(CheckpointOptions.parse(memory_budget=budget))
    capacity = "16GiB" if budget is None and batch == HEADLINE_BATCH else None
    figures: dict[str, Any] = {
        "dropout": dropout,
        "activation": activation,
        "memory_budget": budget,
        "planned_for_batch": batch,
    }
    figures |= {"planned_for_batch": batch, **compared(model, plan.chains, batch, (128, 256), capacity)}
    for name, chains in (("plain", ()), ("planned", plan.chains)):
        figures[name]["flops_per_sample"] = flops(model, (1, 128, 256), chains)
    figures["flops_ratio"] = figures["planned"]["flops_per_sample"] / figures["plain"]["flops_per_sample"]
    print(figures, flush=True)
    return figures


def compared(
    model: nn.Module, plans: Plans, batch: int, sample: tuple[int, ...], capacity: str | None
) -> dict[str, Any]:
    """Bytes per sample without and with a plan, seen from a batch and one twice as large; and the largest batches."""
    figures: dict[str, Any] = {"capacity": capacity}
    for name, chains in (("plain", ()), ("planned", plans)):
        one, two = (predict(step_of(model, (n, *sample), adamw=True), chains) for n in (batch, 2 * batch))
        slope = (two.peak_bytes - one.peak_bytes) / batch
        figures[name] = {"kib_per_sample": slope / 1024, "peak_bytes": one.peak_bytes, "operations": one.operations}
        if capacity is not None:
            guess = int(batch + (parse_size(capacity) - one.peak_bytes) / slope)
            figures[name]["largest_batch"] = largest_batch(model, chains, capacity, sample, guess)
    figures["memory_ratio"] = figures["plain"]["kib_per_sample"] / figures["planned"]["kib_per_sample"]
    if capacity is not None:
        figures["batch_ratio"] = figures["planned"]["largest_batch"] / figures["plain"]["largest_batch"]
    return figures


def largest_batch(model: nn.Module, plans: Plans, capacity: str, sample: tuple[int, ...], guess: int) -> int:
    """A batch that trains for two steps on a virtual device of this capacity, where one 2% larger runs out of it."""
    fitting = guess
    while not fits(model, plans, capacity, (fitting, *sample)):
        fitting = int(fitting * 0.98)
    while fits(model, plans, capacity, (int(fitting * 1.02) + 1, *sample)):
        fitting = int(fitting * 1.02) + 1
    return fitting


def fits(model: nn.Module, plans: Plans, capacity: str, shape: tuple[int, ...]) -> bool:
    try:
        with (
            fake_mode(),
            borrowed([model], TensorExchange()),
            VirtualDevice(capacity, cuda_like=True) as device,
            CudaFunctions(GpuShape()),
        ):
            with device.host():
                x = torch.empty(*shape)
            device.track(model, x)
            optimizer = torch.optim.AdamW(model.parameters())
            with AppliedPlan(model, plans):
                for _ in range(2):
                    loss = model(x).sum()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    except torch.OutOfMemoryError:
        return False
    return True


def gained(make: Callable[[], nn.Module], batch: int = 64) -> dict[str, Any]:
    model, sample = make(), (3, 224, 224)
    plan = StepPlanner(step_of(model, (batch, *sample), adamw=True)).plan(CheckpointOptions.parse())
    found = {"planned_for_batch": batch, "extra_operations": plan.extra_operations, "refused": plan.refused}
    return found | compared(model, plan.chains, batch, sample, "24GiB")


def in_a_process_of_its_own(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What a function measures in a child: its highest memory is its own, and it finds nothing known already."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        plan_checkpoints(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.empty(4, 4))  # imports
        os.write(writing, json.dumps(measure()).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    found: dict[str, float] = json.loads(os.read(reading, 2**16))
    os.close(reading)
    return found


def planning_seconds(only: str = "") -> dict[str, Any]:
    """The least wall time and processor's time of three runs: other programs only lengthen them."""
    found = {}
    for name in [only] if only else PLANNED:
        step = PLANNED[name]()

        def measure(step: TracedStep = step) -> dict[str, float]:
            begin, begin_processor = time.perf_counter(), time.process_time()
            StepPlanner(step).plan(CheckpointOptions.parse())
            return {"wall": time.perf_counter() - begin, "processor": time.process_time() - begin_processor}

        runs = [in_a_process_of_its_own(measure) for _ in range(3)]
        found[name] = {key: round(min(one[key] for one in runs), 2) for key in runs[0]}
        print(name, found[name], flush=True)
    return found


def language_models(only: str = "") -> dict[str, Any]:
    """Language models of transformers as they are, with default arguments: the loss in chunks, and recomputation.

    The peaks of PyTorch's own allocator are there on a device of the dry run:
        .venv-cuda/bin/python -m lightning_memtools.null_cuda benchmarks/checkpointing.py language_models
    """
    hows: tuple[LossHead, ...] = ("auto", "keep")
    cases: dict[str, Callable[[], Case]] = {
        "GPT-2 small": MODELS["GPT-2 small"],
        "BERT base": MODELS["BERT base"],
        "Llama 1B, batch of 4": partial(llama_1b, 4),
        "Llama 1B, batch of 8": partial(llama_1b, 8),
    }
    found: dict[str, Any] = {}
    for name in [only] if only else cases:
        torch.manual_seed(0)
        case = cases[name]()
        found[name] = {}
        for how in hows:
            planner = StepPlanner(case.step())
            begin = time.process_time()
            default = planner.plan(CheckpointOptions.parse(loss_head=how))
            seconds = round(time.process_time() - begin, 2)
            assert default.plain is not None
            plain = default.plain
            most = MOST_OPERATIONS * plain.flops
            third = lowest_within(planner, plain.peak_bytes, partial(_within, most), default, how)
            assert third is not None
            found[name]["plain"] = figures(plain)
            found[name][how] = _with_loss_head(case, default) | {"processor_seconds": seconds}
            found[name][f"{how}, a third more flops"] = _with_loss_head(case, third)
        found[name]["plain"]["allocator_peak_bytes"] = case.allocator_peak()
        print(name, found[name], flush=True)
    return found


def offloaded(only: str = "") -> dict[str, Any]:
    """Plans within twice the activation memory of the default plan, with and without host memory.

    Times are those of the time model, with the rates of an A100; no GPU has confirmed them. Run as `language_models`.
    """
    found: dict[str, Any] = {}
    for name in [only] if only else ("GPT-2 small", "BERT base", "ViT-B/16 (timm)", "ConvNeXt-T (timm)", "ResNet-50"):
        torch.manual_seed(0)
        case = MODELS[name]()
        planner = StepPlanner(case.step())
        found[name] = {}
        default = planner.plan(CheckpointOptions.parse(bn_dropout="recompute"))
        assert default.plain is not None
        assert default.planned is not None
        share = 2 * default.planned.activation_bytes / default.plain.activation_bytes
        hows: dict[str, Offload] = {"recomputation": False, "with offload": "auto"}
        for how, offload in hows.items():
            options = CheckpointOptions.parse("auto", share, "recompute", offload=offload, host_memory="256GiB")
            plan = planner.plan(options)
            assert plan.plain is not None
            found[name]["plain"] = figures(plan.plain)
            found[name][how] = _with_loss_head(case, plan) | {
                "relative_time": plan.relative_time or 1 + plan.extra_operations,
                "extra_operations": plan.extra_operations,
                "host_bytes": plan.host_bytes,
            }
        print(name, found[name], flush=True)
    return found


def _within(flops: float, cost: StepCost) -> bool:
    return cost.flops <= flops


def _with_loss_head(case: Case, plan: CheckpointPlan) -> dict[str, Any]:
    assert plan.planned is not None
    with AppliedPlan(case.model, plan.chains, heads=plan.heads):
        return {**figures(plan.planned), "heads": list(plan.heads), "allocator_peak_bytes": case.allocator_peak()}


def flat_chain(length: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) if i % 2 else nn.GELU() for i in range(length)])


PLANNED: dict[str, Callable[[], TracedStep]] = {
    "chain of 100 layers": lambda: step_of(flat_chain(100), (4096, 64)),
    "ResNet-152": lambda: step_of(torchvision_models().resnet152(), (16, 3, 224, 224)),
    **{
        name: lambda name=name: MODELS[name]().step()  # type: ignore[misc]
        for name in ("GPT-2 small", "ViT-B/16 (timm)", "Swin-T (timm)", "HRNet-W48 (timm)")
    },
}


def planning_by_length(only: str = "") -> dict[str, Any]:
    """The processor's time and the memory that planning takes, for flat chains of so many layers."""
    found = {}
    for n in [int(only)] if only else (20, 200, 400, 2000):

        def measure(n: int = n) -> dict[str, float]:
            model = flat_chain(n)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            begin = time.process_time()
            plan = plan_checkpoints(model, torch.empty(4096, 64))
            return {
                "processor_seconds": round(time.process_time() - begin, 2),
                "mib_before": before // 1024,
                "mib_more": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024,
                "peak_share": (plan.peak_bytes or 0) / (plan.plain_peak_bytes or 1),
                "extra_operations": plan.extra_operations,
            }

        found[str(n)] = in_a_process_of_its_own(measure)
        print(n, found[str(n)], flush=True)
    return found


def wall_time() -> dict[str, float]:
    """A real training step on this CPU, planned against plain: the ratio of medians of interleaved runs."""
    model, x = encoder(8, 0.0), torch.randn(8, 128, 256)
    plan = plan_checkpoints(model, x)

    def step(chains: Plans) -> Callable[[], float]:
        def run() -> float:
            with AppliedPlan(model, chains):
                begin = time.perf_counter()
                model(x).sum().backward()
                return time.perf_counter() - begin

        return run

    samples = interleaved({"plain": step(()), "planned": step(plan.chains)}, 15)
    middle = {name: statistics.median(times) for name, times in samples.items()}
    return {"ratio": middle["planned"] / middle["plain"], "predicted_ratio": 1 + plan.extra_operations, "runs": 15}


def sections() -> dict[str, Callable[[], Any]]:
    zoo = torchvision_models()
    return {
        "headline": lambda: [
            headline(dropout, activation, budget=budget, batch=batch)
            for dropout in (0.1, 0.0)
            for activation in ("gelu", "relu")
            for budget, batch in ((None, HEADLINE_BATCH), (None, 64), (0.05, HEADLINE_BATCH))
        ],
        "planning_seconds": planning_seconds,
        "planning_by_length": planning_by_length,
        "gained_with_default_arguments": lambda: {
            "ResNet-50": gained(zoo.resnet50),
            "ViT-S/16 (timm)": gained(lambda: timm().create_model("vit_small_patch16_224")),
            "VGG-16": gained(zoo.vgg16),
        },
        "language_models": language_models,
        "offload": offloaded,
        "wall_time": wall_time,
        "frontier": frontiers,
    }


def main() -> None:
    """Measure the sections named on the command line, or all; the others keep what the file has of them.

    "frontier/VGG-16 features", "planning_seconds/ResNet-152" and "planning_by_length/400" measure one entry of their
    sections.
    """
    file = RESULTS / "checkpointing.json"
    measures = sections()
    for asked in sys.argv[1:] or measures:
        name, _, part = asked.partition("/")
        of_entry = {
            "frontier": frontiers,
            "planning_seconds": planning_seconds,
            "planning_by_length": planning_by_length,
            "language_models": language_models,
            "offload": offloaded,
        }
        measured = of_entry[name](part) if part else measures[name]()
        # Read only now: another section may have been written meanwhile.
        results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        results.pop("machine", None)
        results[name] = results.get(name, {}) | measured if part else measured
        save("checkpointing", results)
        if name == "frontier":
            (DOCS / "gradient-checkpointing.svg").write_text(picture(dict(list(results[name].items())[:8])))


if __name__ == "__main__":
    main()
