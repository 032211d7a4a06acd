"""Plans beside `checkpoint_sequential` and uniform segments, the headline of 48 blocks, and language models.

Everything is traced on fake tensors in the simulated allocator with CUDA's operators: no figure depends on the machine.

    python benchmarks/checkpointing_frontier.py [frontier | headline | "language models" ...]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from checkpointing_switches import MODELS, Case, divided, llama_1b, lowest_within
from machine import save
from torch import Tensor, nn

from lightning_memtools._torch import fake_mode
from lightning_memtools.checkpointing.apply_plan import AppliedPlan, ChainPlan, Range
from lightning_memtools.checkpointing.chains import find_chains, outermost
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions, LossHead
from lightning_memtools.checkpointing.planning import MOST_OPERATIONS, BudgetTooSmallError, StepPlanner, predict
from lightning_memtools.memory.cuda_ops.functions import ReplacedFunctions, cuda_functions
from lightning_memtools.memory.sizes import GpuShape, parse_size
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.fakes import TensorExchange, borrowed
from lightning_memtools.simulation.tracer import StepCost, StepRequest
from tests.zoo import torchvision_models

Plans = Sequence[ChainPlan]


# --- beside checkpoint_sequential and uniform segments


def frontier_models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    zoo = torchvision_models()
    perceptron = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))]
    widths = [64, 2048, 32, 512, 512, 4096, 16, 1024, 128, 3072, 64, 256, 2048, 8, 640, 64]
    unequal = [layer for one, other in itertools.pairwise(widths) for layer in (nn.Linear(one, other), nn.GELU())]
    convolutions: list[nn.Module] = []
    for n_in in (3, *[32] * 11):
        convolutions += [nn.Conv2d(n_in, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return {
        "MLP": (nn.Sequential(*perceptron), (4096, 512)),
        "VGG-16 features": (zoo.vgg16().features, (16, 3, 224, 224)),
        "AlexNet": (zoo.alexnet(), (64, 3, 224, 224)),
        "conv-BN net": (nn.Sequential(*convolutions), (16, 3, 64, 64)),
        "encoder": (encoder(12, 0.1), (32, 128, 256)),
        "ResNet-50": (zoo.resnet50(), (16, 3, 224, 224)),
        "MobileNetV2": (zoo.mobilenet_v2(), (16, 3, 224, 224)),
        "unequal chain": (nn.Sequential(*unequal), (4096, 64)),
        # checkpoint_sequential fails at most chunk counts of these two as they are: so once more as it can take them.
        "VGG-16, no in-place": (not_in_place(zoo.vgg16().features), (16, 3, 224, 224)),
        "AlexNet, no in-place": (not_in_place(zoo.alexnet()), (64, 3, 224, 224)),
    }


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


def not_in_place(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def step_of(model: nn.Module, shape: Sequence[int], *, adamw: bool = False) -> StepRequest:
    optimizer = torch.optim.AdamW if adamw else None
    return StepRequest(model=model, batch=(torch.empty(*shape),), step=lambda m, args: m(*args), optimizer=optimizer)


def uniform(model: nn.Module, chains: Sequence[Any]) -> Iterator[tuple[str, list[ChainPlan]]]:
    """checkpoint_sequential at every number of chunks, and every uniform length with all of it recomputed."""
    modules = dict(model.named_modules())
    ends_of = {chain.name: _ends(chain, modules[chain.name]) for chain in chains}
    longest = max(len(ends) for ends in ends_of.values()) - 1
    for last_too in (False, True):
        for number in range(1, longest + 1):
            plans = []
            for chain in chains:
                ends = ends_of[chain.name]
                n = len(ends) - 1
                length = min(number, n) if last_too else n // min(number, n)
                starts = list(range(0, n, length)) if last_too else [length * i for i in range(min(number, n) - 1)]
                ranges = tuple(Range(ends[a], ends[min(a + length, n)]) for a in starts)
                plans.append(ChainPlan(chain.name, chain.layers, ranges))
            yield (f"uniform, {number} layers each" if last_too else f"checkpoint_sequential, {number} chunks"), plans


def _ends(chain: Any, module: nn.Module) -> list[int]:
    """Where each child of the Sequential begins in the flattened chain, and where the last one ends."""
    paths = [f"{chain.name}.{key}" if chain.name else key for key in module._modules]
    counts = [sum(name == path or name.startswith(f"{path}.") for name in chain.layers) for path in paths]
    return [0, *itertools.accumulate(counts)]


def frontier(model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    step = step_of(model, shape)
    planner = StepPlanner(step)
    chains = outermost(find_chains(model, CheckpointOptions.parse(bn_dropout="recompute")))
    others, n_failed = list[tuple[str, StepCost]](), 0
    for name, plans in uniform(model, chains):
        try:
            others.append((name, predict(step, plans)))
        except RuntimeError:  # a chunk that begins with an in-place layer
            n_failed += 1
    plain = predict(step, ())
    known: dict[int, StepCost] = {plain.peak_bytes: plain}

    def ours(limit: int) -> StepCost:
        """The plan of fewest operations within a peak, or the lowest there is."""
        if limit not in known:
            try:
                plan = planner.plan(CheckpointOptions.parse(bn_dropout="recompute", memory_budget=f"{limit}B"))
            except BudgetTooSmallError as error:
                known[limit] = ours(error.reachable_bytes)
            else:
                assert plan.planned is not None
                known[limit] = plan.planned
        return known[limit]

    for _, cost in others:
        for share in (1, 0.99, 0.98):
            ours(int(share * cost.peak_bytes))
    lowest = min(others, key=lambda pair: pair[1].peak_bytes)
    default = planner.plan(CheckpointOptions.parse(bn_dropout="recompute"))
    best = lowest_within(planner, lowest[1].peak_bytes, partial(_costs_no_more, lowest[1]), default)
    assert best is not None
    assert best.planned is not None
    return {
        "plain_mib": round(plain.peak_bytes / 2**20, 1),
        "lowest_of_the_others": {
            "name": lowest[0],
            "mib": round(lowest[1].peak_bytes / 2**20, 1),
            "operations": round(lowest[1].operations / plain.operations, 3),
            "plan_mib": round(best.planned.peak_bytes / 2**20, 1),
        },
        "others": len(others),
        "fail": n_failed,
        "matched": sum(any(_is_as_good(one, cost) for one in known.values()) for _, cost in others),
        "strictly_lower": sum(
            any(one.peak_bytes < cost.peak_bytes and _costs_no_more(cost, one) for one in known.values())
            for _, cost in others
        ),
    }


def _is_as_good(one: StepCost, other: StepCost) -> bool:
    return one.peak_bytes <= other.peak_bytes and _costs_no_more(other, one)


def _costs_no_more(than: StepCost, one: StepCost) -> bool:
    """In FLOPs, and in operations, which count elementwise work too."""
    return one.flops <= than.flops and one.operations <= than.operations


# --- 48 blocks


def headline(dropout: float, budget: float | None, batch: int = 256, capacity: str = "16GiB") -> dict[str, Any]:
    """What a plan saves for each sample, the difference between a batch and twice as many; and the largest batches."""
    model = encoder(48, dropout)
    plan = StepPlanner(step_of(model, (batch, 128, 256), adamw=True)).plan(
        CheckpointOptions.parse(memory_budget=budget)
    )
    slopes, flops, largest = list[float](), list[int](), list[int]()
    for chains in ((), plan.chains):
        one, two = (predict(step_of(model, (n, 128, 256), adamw=True), chains) for n in (batch, 2 * batch))
        slopes.append((two.peak_bytes - one.peak_bytes) / batch)
        flops.append(one.flops)
        guess = int(batch + (parse_size(capacity) - one.peak_bytes) / slopes[-1])
        largest.append(largest_batch(model, chains, capacity, guess))
    return {
        "dropout": dropout,
        "memory_budget": budget,
        "kib_per_sample": [round(slope / 1024) for slope in slopes],
        "memory_ratio": round(slopes[0] / slopes[1], 2),
        "flops_ratio": round(flops[1] / flops[0], 3),
        "largest_batch": largest,
        "batch_ratio": round(largest[1] / largest[0], 2),
    }


def largest_batch(model: nn.Module, plans: Plans, capacity: str, guess: int) -> int:
    """A batch that trains for two steps on a virtual device of this capacity, where one 2% larger runs out of it."""
    while not fits(model, plans, capacity, guess):
        guess = int(guess * 0.98)
    while fits(model, plans, capacity, int(guess * 1.02) + 1):
        guess = int(guess * 1.02) + 1
    return guess


def fits(model: nn.Module, plans: Plans, capacity: str, batch: int) -> bool:
    try:
        with (
            fake_mode(),
            borrowed(model, TensorExchange()),
            VirtualDevice(capacity, cuda_like=True) as device,
            ReplacedFunctions(cuda_functions(GpuShape())),
        ):
            with device.host():
                x = torch.empty(batch, 128, 256)
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


# --- language models


def language_model(make: Callable[[], Case]) -> dict[str, Any]:
    """The lowest plans with at most a third more FLOPs: with the loss in chunks ("auto"), and with all its logits."""
    torch.manual_seed(0)
    case = make()
    found: dict[str, Any] = {}
    hows: tuple[LossHead, ...] = ("auto", "keep")
    for how in hows:
        planner = StepPlanner(case.step())
        default = planner.plan(CheckpointOptions.parse(loss_head=how))
        assert default.plain is not None
        plain = default.plain

        def accepted(cost: StepCost, most: float = MOST_OPERATIONS * plain.flops) -> bool:
            return cost.flops <= most

        plan = lowest_within(planner, plain.peak_bytes, accepted, default, how)
        assert plan is not None
        assert plan.planned is not None
        found["plain_mib"] = round(plain.peak_bytes / 2**20, 1)
        found[how] = in_short(vars_of(plain), vars_of(plan.planned))
    return found


def vars_of(cost: StepCost) -> dict[str, int]:
    return {"peak_bytes": cost.peak_bytes, "static_bytes": cost.static_bytes, "flops": cost.flops}


def in_short(plain: dict[str, int], planned: dict[str, int]) -> dict[str, float]:
    """A plan's peak, its FLOPs as a multiple of the plain step's, and how many times less activation memory it has."""
    return {
        "mib": round(planned["peak_bytes"] / 2**20, 1),
        "flops": round(planned["flops"] / plain["flops"], 3),
        "activations_divided_by": divided(plain, planned),
    }


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "frontier": lambda: {name: frontier(*model) for name, model in frontier_models().items()},
    "headline": lambda: {"rows": [headline(dropout, budget) for dropout in (0.1, 0.0) for budget in (None, 0.07)]},
    "language models": lambda: {
        **{name: language_model(MODELS[name]) for name in ("GPT-2 small", "BERT base")},
        **{f"Llama 1B, batch of {batch}": language_model(partial(llama_1b, batch)) for batch in (4, 8)},
    },
}


if __name__ == "__main__":
    for section in sys.argv[1:] or SECTIONS:
        save("checkpointing_switches", SECTIONS[section](), section=section)
