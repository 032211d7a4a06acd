"""What gradient checkpointing saves and costs: simulated peaks, counted operations, and the time that planning takes.

Everything here is traced on fake tensors in the simulated allocator, along CUDA's path: but for the times, the figures
are the same on every machine. Writes results/checkpointing.json and docs/gradient-checkpointing.svg.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, interleaved, save
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))
import itertools

from lightning_memtools.checkpointing.apply import Applied
from lightning_memtools.checkpointing.fakes import fake_mode, fake_model, fake_values
from lightning_memtools.checkpointing.find import depths, find_chains
from lightning_memtools.checkpointing.options import Options
from lightning_memtools.checkpointing.places import chain_plans
from lightning_memtools.checkpointing.plan import Planner
from lightning_memtools.checkpointing.planning import make_plan, plan_checkpoints
from lightning_memtools.checkpointing.predict import predict
from lightning_memtools.checkpointing.profiling import profile
from lightning_memtools.checkpointing.ranges import ChainPlan, Range
from lightning_memtools.checkpointing.tracing import Cost, Step
from lightning_memtools.checkpointing.units import estimate
from lightning_memtools.estimate.functions import CudaFunctions
from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.memory.virtual import VirtualDevice
from tests.zoo import timm, torchvision_models

Plans = Sequence[ChainPlan]
DOCS = Path(__file__).parents[1] / "docs"
# Large enough that activations are most of what there is, also of the planned step: there a larger batch is wanted.
HEADLINE_BATCH = 256


class Block(nn.Module):
    """A pre-norm transformer block of width 256 with 8 heads."""

    def __init__(self, dropout: float, activation: str) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(256, 8, 1024, dropout, activation, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


def encoder(depth: int, dropout: float, activation: str = "gelu") -> nn.Sequential:
    return nn.Sequential(*[Block(dropout, activation) for _ in range(depth)])


def step_of(model: nn.Module, shape: Sequence[int], *, adamw: bool = False) -> Step:
    optimizers = (torch.optim.AdamW(model.parameters()),) if adamw else ()
    return Step(model, (torch.empty(*shape),), lambda copy, args: copy(*args), optimizers, device="cuda")


def flops(model: nn.Module, shape: Sequence[int], plans: Plans) -> int:
    """FLOPs of one step by torch's own counter, in a pass of its own: it keeps recomputed tensors alive."""
    with fake_mode():
        copy = fake_model(model)
        (x,) = fake_values((torch.empty(*shape),))
        with CudaFunctions(), Applied(copy, plans), FlopCounterMode(display=False) as counter:
            copy(x).sum().backward()
    return int(counter.get_total_flops())


# --- the headline


def headline(dropout: float, activation: str, *, budget: float | None = None, batch: int = 256) -> dict[str, Any]:
    """A plan for one batch size, and what it saves per sample: the difference between this batch and twice as many."""
    model = encoder(48, dropout, activation)
    plan = make_plan(step_of(model, (batch, 128, 256), adamw=True), Options.parse(memory_budget=budget))
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
        with fake_mode(), VirtualDevice(capacity, cuda_like=True) as device, CudaFunctions():
            copy = fake_model(model)
            (x,) = fake_values((torch.empty(*shape),))
            device.track(copy, x)
            optimizer = torch.optim.AdamW(copy.parameters())
            with Applied(copy, plans):
                for _ in range(2):
                    loss = copy(x).sum()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    except torch.OutOfMemoryError:
        return False
    return True


# --- the frontier


def conv_bn(depth: int = 12) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


def unequal() -> nn.Sequential:
    widths = [64, 2048, 32, 512, 512, 4096, 16, 1024, 128, 3072, 64, 256, 2048, 8, 640, 64]
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), nn.GELU()]
    return nn.Sequential(*layers)


def mlp() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))])


def frontier_models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    zoo = torchvision_models()
    return {
        "MLP": (mlp(), (4096, 512)),
        "VGG-16 features": (zoo.vgg16().features, (16, 3, 224, 224)),
        "AlexNet": (zoo.alexnet(), (64, 3, 224, 224)),
        "conv-BN net": (conv_bn(), (16, 3, 64, 64)),
        "encoder": (encoder(12, 0.1), (32, 128, 256)),
        "ResNet-50": (zoo.resnet50(), (16, 3, 224, 224)),
        "MobileNetV2": (zoo.mobilenet_v2(), (16, 3, 224, 224)),
        "unequal chain": (unequal(), (4096, 64)),
        # checkpoint_sequential fails at most chunk counts of these two as they are: so once more as it can take them.
        "VGG-16, no in-place": (not_in_place(zoo.vgg16().features), (16, 3, 224, 224)),
        "AlexNet, no in-place": (not_in_place(zoo.alexnet()), (64, 3, 224, 224)),
    }


def not_in_place(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def uniform(model: nn.Module, chains: Sequence[Any]) -> Iterator[tuple[str, list[ChainPlan]]]:
    """checkpoint_sequential at every number of chunks, and every uniform length with all of it recomputed."""
    modules = dict(model.named_modules())
    children = {chain.name: _ends(chain, modules[chain.name]) for chain in chains}
    longest = max(len(ends) for ends in children.values())
    for last_too in (False, True):
        for number in range(1, longest + 1):
            plans = []
            for chain in chains:
                ends = [0, *children[chain.name]]
                n = len(ends) - 1
                length = min(number, n) if last_too else n // min(number, n)
                starts = list(range(0, n, length)) if last_too else [length * i for i in range(min(number, n) - 1)]
                ranges = tuple(Range(ends[a], ends[min(a + length, n)]) for a in starts)
                plans.append(ChainPlan(chain.name, chain.layers, ranges))
            yield (f"uniform, {number} layers each" if last_too else f"checkpoint_sequential, {number} chunks"), plans


def _ends(chain: Any, module: nn.Module) -> list[int]:
    """Where each child of the Sequential ends in the flattened chain."""
    counts = []
    for key in module._modules:
        path = f"{chain.name}.{key}" if chain.name else key
        counts.append(sum(name == path or name.startswith(f"{path}.") for name in chain.layers))
    return [sum(counts[: i + 1]) for i in range(len(counts))]


def frontier(model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    step = step_of(model, shape)
    chains = depths(find_chains(model, Options.parse(bn_dropout="recompute")))[0]
    measured = profile(step, chains)
    planner = Planner(measured.units, int(1.02 * measured.plain.peak_bytes))
    known: dict[Any, Cost] = {}

    def ours(limit: float) -> Cost | None:
        ranges = planner.best(limit)
        if ranges is None:
            return None
        if ranges not in known:
            known[ranges] = predict(step, chain_plans(measured, chains, ranges))
        return known[ranges]

    baselines, failed = [], Counter[str]()
    for name, plans in uniform(model, chains):
        try:
            baselines.append((name, predict(step, plans)))
        except RuntimeError as error:  # a chunk that begins with an in-place layer
            failed[str(error).split(": ")[0]] += 1
    beaten, lower, losses = 0, 0, []
    for name, cost in baselines:
        found = [one for share in (1.0, 0.997, 0.994, 0.99, 0.98) if (one := ours(cost.peak_bytes * share)) is not None]
        found += [measured.plain]
        good = [one for one in found if no_worse(one, cost)]
        # Ours at no more operations than this one, as low as it gets.
        affordable = [
            peak for peak, extra in planner.frontier() if measured.plain.operations + extra <= cost.operations
        ]
        lowest = ours(affordable[-1]) if affordable else None
        if lowest is not None and no_worse(lowest, cost):
            good.append(lowest)
        beaten += bool(good)
        if not good:
            losses.append([name, cost.peak_bytes, cost.operations])
        lower += any(one.peak_bytes < cost.peak_bytes for one in good)
    least = min(baselines, key=lambda pair: pair[1].peak_bytes)
    for peak, _ in planner.frontier()[:: max(1, len(planner.frontier()) // 12)]:
        ours(peak)
    plain = measured.plain
    points = sorted({(one.peak_bytes, one.operations) for one in [*known.values(), plain]})
    at_least = [one for one in known.values() if one.operations <= least[1].operations and one.flops <= least[1].flops]
    return {
        "plain_peak_bytes": plain.peak_bytes,
        "static_bytes": plain.static_bytes,
        "plain_operations": plain.operations,
        "baselines": len(baselines),
        "baselines_that_fail": dict(failed),
        "matched_or_beaten": beaten,
        "strictly_lower": lower,
        "largest_error_of_the_memory_model": max(
            abs(estimate(measured.units, ranges).peak_bytes / cost.peak_bytes - 1) for ranges, cost in known.items()
        ),
        "not_matched": losses,
        "lowest_baseline": {"name": least[0], "peak_bytes": least[1].peak_bytes, "operations": least[1].operations},
        "ours_at_its_operations_bytes": min(one.peak_bytes for one in at_least),
        "points": {"ours": _pareto(points), "baselines": [[c.peak_bytes, c.operations] for _, c in baselines]},
    }


def no_worse(one: Cost, other: Cost) -> bool:
    """In memory, in FLOPs, and in operations, which count elementwise work too."""
    return one.peak_bytes <= other.peak_bytes and one.flops <= other.flops and one.operations <= other.operations


def _pareto(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)]


# --- what a person gains with default arguments, and the time of planning


def gained(make: Callable[[], nn.Module], batch: int = 64) -> dict[str, Any]:
    model, sample = make(), (3, 224, 224)
    plan = make_plan(step_of(model, (batch, *sample), adamw=True), Options.parse())
    found = {"planned_for_batch": batch, "extra_operations": plan.extra_operations, "refused": plan.refused}
    return found | compared(model, plan.chains, batch, sample, "24GiB")


def seconds_to_plan(model: nn.Module, shape: tuple[int, ...], repeats: int = 3) -> dict[str, float]:
    """Medians of wall time, which a loaded machine lengthens, and of the processor's time in this process."""
    x = torch.empty(shape)
    walls, processor = [], []
    for _ in range(repeats):
        begin, begin_processor = time.perf_counter(), time.process_time()
        plan_checkpoints(model, x)
        walls.append(time.perf_counter() - begin)
        processor.append(time.process_time() - begin_processor)
    return {"wall": statistics.median(walls), "processor": statistics.median(processor)}


def wall_time() -> dict[str, float]:
    """A real training step on this CPU, planned against plain: the ratio of medians of interleaved runs."""
    model, x = encoder(8, 0.0), torch.randn(8, 128, 256)
    plan = plan_checkpoints(model, x)

    def step(chains: Plans) -> Callable[[], float]:
        def run() -> float:
            with Applied(model, chains):
                begin = time.perf_counter()
                model(x).sum().backward()
                return time.perf_counter() - begin

        return run

    samples = interleaved({"plain": step(()), "planned": step(plan.chains)}, 15)
    middle = {name: statistics.median(times) for name, times in samples.items()}
    return {"ratio": middle["planned"] / middle["plain"], "predicted_ratio": 1 + plan.extra_operations, "runs": 15}


def picture(results: dict[str, Any]) -> str:
    """One panel per model: operations against peak, as shares of the plain step's."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="960" height="500" font-family="sans-serif" font-size="12">'
    ]
    parts.append('<rect width="960" height="500" fill="white"/>')
    for at, (name, one) in enumerate(results.items()):
        left, top = 40 + 235 * (at % 4), 30 + 240 * (at // 4)
        parts.append(f'<rect x="{left}" y="{top}" width="180" height="170" fill="none" stroke="#999"/>')
        parts.append(f'<text x="{left}" y="{top - 8}" font-weight="bold">{name}</text>')
        parts.append(f'<text x="{left}" y="{top + 186}">1.0</text><text x="{left + 160}" y="{top + 186}">1.5</text>')
        parts.append(
            f'<text x="{left + 55}" y="{top + 200}">operations</text><text x="{left - 30}" y="{top + 10}">100%</text>'
        )

        def place(point: Sequence[float], left: int = left, top: int = top, one: dict[str, Any] = one) -> str:
            across = min(max((point[1] / one["plain_operations"] - 1) / 0.5, 0), 1)
            return f"{left + 180 * across:.1f},{top + 170 * (1 - min(point[0] / one['plain_peak_bytes'], 1.0)):.1f}"

        for point in one["points"]["baselines"]:
            x, y = place(point).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="#d62728" fill-opacity="0.5"/>')
        line = " ".join(
            place(point)
            for point in sorted(one["points"]["ours"], key=lambda p: p[1])
            if point[1] < 1.5 * one["plain_operations"]
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>')
    parts.append(
        '<text x="40" y="490">peak (100% is the plain step) against operations. Blue: plans of this library. '
        "Red: checkpoint_sequential at every chunk count, and uniform segments.</text></svg>"
    )
    return "\n".join(parts)


def sections() -> dict[str, Callable[[], Any]]:
    zoo = torchvision_models()
    return {
        "headline": lambda: [
            headline(dropout, activation, budget=budget, batch=batch)
            for dropout in (0.1, 0.0)
            for activation in ("gelu", "relu")
            for budget, batch in ((None, HEADLINE_BATCH), (None, 64), (0.05, HEADLINE_BATCH))
        ],
        "planning_seconds": lambda: {
            "chain of 100 layers": seconds_to_plan(
                nn.Sequential(*[nn.Linear(64, 64) if i % 2 else nn.GELU() for i in range(100)]), (4096, 64)
            ),
            "ResNet-152": seconds_to_plan(zoo.resnet152(), (16, 3, 224, 224)),
        },
        "gained_with_default_arguments": lambda: {
            "ResNet-50": gained(zoo.resnet50),
            "ViT-S/16 (timm)": gained(lambda: timm().create_model("vit_small_patch16_224")),
            "VGG-16": gained(zoo.vgg16),
        },
        "wall_time": wall_time,
        "frontier": frontiers,
    }


def frontiers() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (model, shape) in frontier_models().items():
        results[name] = frontier(model, shape)
        print(name, {key: value for key, value in results[name].items() if key != "points"}, flush=True)
    return results


def main() -> None:
    """Measure the sections named on the command line, or all; the others keep what the file has of them."""
    file = RESULTS / "checkpointing.json"
    for name, measure in sections().items():
        if name in sys.argv[1:] or len(sys.argv) == 1:
            measured = measure()
            # Read only now: another section may have been written meanwhile.
            results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
            results.pop("machine", None)
            save("checkpointing", results | {name: measured})
            if name == "frontier":
                (DOCS / "gradient-checkpointing.svg").write_text(picture(measured))


if __name__ == "__main__":
    main()
