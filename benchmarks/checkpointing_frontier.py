"""Peaks and operations of plans beside those of `checkpoint_sequential` and of uniform segments, with a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from checkpointing_models import frontier_models, step_of
from torch import nn

from lightning_memtools.checkpointing.chains import depths, find_chains
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.checkpoint_plan import chain_plans
from lightning_memtools.checkpointing.memory_model import ChainPlan, Range, estimate
from lightning_memtools.checkpointing.optimal_ranges import OptimalRanges
from lightning_memtools.checkpointing.step_profile import predict, profile_step
from lightning_memtools.simulation.step_trace import StepCost

# What the picture shows: a panel's size, and the most operations of a step, as a multiple of the plain step's.
_WIDTH, _HEIGHT, _MOST = 190, 150, 1.5
_OURS, _OTHERS = "#1f77b4", "#d62728"


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
    chains = depths(find_chains(model, CheckpointOptions.parse(bn_dropout="recompute")))[0]
    measured = profile_step(step, chains)
    planner = OptimalRanges(measured.units, int(1.02 * measured.plain.peak_bytes))
    known: dict[Any, StepCost] = {}

    def ours(limit: float) -> StepCost | None:
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


def no_worse(one: StepCost, other: StepCost) -> bool:
    """In memory, in FLOPs, and in operations, which count elementwise work too."""
    return one.peak_bytes <= other.peak_bytes and one.flops <= other.flops and one.operations <= other.operations


def _pareto(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)]


def frontiers(only: str = "") -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (model, shape) in frontier_models().items():
        if only not in {"", name}:
            continue
        results[name] = frontier(model, shape)
        print(name, {key: value for key, value in results[name].items() if key != "points"}, flush=True)
    return results


def picture(results: dict[str, Any]) -> str:
    """One panel per model: the peak, as a share of the plain step's, against operations."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="520" font-family="sans-serif" font-size="12">',
        '<rect width="1000" height="520" fill="white"/>',
        f'<circle cx="56" cy="18" r="3" fill="{_OTHERS}" fill-opacity="0.6"/>',
        '<text x="66" y="22">checkpoint_sequential at every chunk count, and uniform segments</text>',
        f'<path d="M 486 18 h 20" stroke="{_OURS}" stroke-width="2"/>',
        '<text x="512" y="22">plans of this library; lower and further left is better</text>',
    ]
    for at, (name, one) in enumerate(results.items()):
        parts += _panel(name, one, 56 + 240 * (at % 4), 60 + 235 * (at // 4))
    return "\n".join([*parts, "</svg>"])


def _panel(name: str, one: dict[str, Any], left: int, top: int) -> Iterator[str]:
    def place(peak: float, operations: float) -> tuple[float, float]:
        across = (operations / one["plain_operations"] - 1) / (_MOST - 1)
        return left + _WIDTH * across, top + _HEIGHT * (1 - peak / one["plain_peak_bytes"])

    yield f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>'
    yield f'<text x="{left}" y="{top - 8}" font-weight="bold">{name}</text>'
    for percent in (0, 50, 100):
        y = top + _HEIGHT * (1 - percent / 100)
        yield f'<path d="M {left} {y} h {_WIDTH}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{percent}%</text>'
    for times in (1.0, 1.25, 1.5):
        x = left + _WIDTH * (times - 1) / (_MOST - 1)
        yield f'<text x="{x}" y="{top + _HEIGHT + 16}" text-anchor="middle">{times:g}x</text>'
    yield (
        f'<text x="{left + _WIDTH / 2}" y="{top + _HEIGHT + 32}" text-anchor="middle" fill="#555">'
        "peak against operations</text>"
    )
    most = _MOST * one["plain_operations"]
    for peak, operations in one["points"]["baselines"]:
        if operations <= most and peak <= one["plain_peak_bytes"]:
            x, y = place(peak, operations)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_OTHERS}" fill-opacity="0.6"/>'
    ours = sorted((operations, peak) for peak, operations in one["points"]["ours"] if operations <= most)
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(peak, operations) for operations, peak in ours))
    yield f'<polyline points="{steps}" fill="none" stroke="{_OURS}" stroke-width="2"/>'
