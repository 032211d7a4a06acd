"""A plan as one table."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memtools.checkpointing.ranges import ChainPlan, runs_again
from lightning_memtools.checkpointing.tracing import Cost
from lightning_memtools.memory.sizes import format_size

HEADS = ("module", "layers", "recomputed", "left out", "kept before", "kept after", "extra")
_MOST_RANGES = 12


def plan_rows(chains: Sequence[ChainPlan], plain: Cost | None) -> list[tuple[str, ...]]:
    """One row of text per chain, under `HEADS`."""
    operations = plain.operations if plain is not None and plain.operations else 1
    return [
        (
            chain.name or "(the model)",
            str(len(chain.layers)),
            _ranges(chain),
            _left_out(chain),
            format_size(chain.plain_kept_bytes),
            format_size(chain.kept_bytes),
            f"{chain.extra_operations / operations:.1%}",
        )
        for chain in chains
    ]


def plan_figures(plain: Cost | None, planned: Cost | None, measured_bytes: int | None = None) -> list[str]:
    """What the plan saves and costs, a line each."""
    if plain is None or planned is None:
        return []
    more = planned.operations / plain.operations - 1 if plain.operations else 0.0
    before, after = format_size(plain.activation_bytes), format_size(planned.activation_bytes)
    lines = [
        f"activation memory: {before} before, {after} after",
        f"extra computation: {more:.1%}",
        f"predicted peak (simulated): {format_size(plain.peak_bytes)} before, {format_size(planned.peak_bytes)} after",
    ]
    if measured_bytes is not None:
        off = measured_bytes / planned.peak_bytes - 1
        lines.append(f"measured peak: {format_size(measured_bytes)} ({off:+.1%} of the predicted one)")
    return lines


def plan_table(
    chains: Sequence[ChainPlan],
    plain: Cost | None,
    planned: Cost | None,
    refused: str | None,
    measured_bytes: int | None = None,
) -> str:
    """The plan in markdown: a row per chain, then the figures."""
    lines = ["# Gradient checkpointing", ""]
    if refused is not None:
        lines += [f"Nothing is recomputed. {refused}", ""]
    if chains:
        rows = [HEADS, ("---", "---:", "---", "---", "---:", "---:", "---:"), *plan_rows(chains, plain)]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
        lines.append("")
    lines += [f"- {line}" for line in plan_figures(plain, planned, measured_bytes)]
    return "\n".join(lines).rstrip() + "\n"


def _ranges(chain: ChainPlan) -> str:
    if not chain.ranges:
        return "nothing"
    shown = [str(one) for one in chain.ranges]
    text = ", ".join(shown[:_MOST_RANGES]) + (
        f" and {len(shown) - _MOST_RANGES} more" if len(shown) > _MOST_RANGES else ""
    )
    times = list(runs_again(chain.ranges))
    return f"{text} ({_counted(len(set(times)), 'layer')}, {_counted(len(times), 'run')})"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _left_out(chain: ChainPlan) -> str:
    reasons: dict[str, list[int]] = {}
    for at, why in chain.outside.items():
        reasons.setdefault(why, []).append(at)
    return "; ".join(f"{_indices(found)}: {why}" for why, found in reasons.items()) or "none"


def _indices(found: Sequence[int]) -> str:
    shown = ", ".join(map(str, found[:_MOST_RANGES]))
    return shown if len(found) <= _MOST_RANGES else f"{shown} and {len(found) - _MOST_RANGES} more"
