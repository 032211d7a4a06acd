"""The tables of docs/checkpointing-compared.md about models' own switches. Run as a program, it updates the page.

python -m tests.checkpointing_docs
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "checkpointing-compared.md"
RESULTS = ROOT / "benchmarks" / "results" / "checkpointing_switches.json"
_BEGIN, _END = "<!-- switches -->\n", "<!-- end of switches -->"
_OWN = ("gradient_checkpointing_enable()", "set_grad_checkpointing()")
_POLICIES = (
    "every block",
    "every second block",
    "every block, selective by operator",
    "checkpoint_sequential",
)
TRANSFORMERS = ("GPT-2", "BERT", "Llama", "T5", "ViT")
"""Models whose blocks are alike and as wide as their input: the goal of 8 times less is theirs."""


def models() -> dict[str, Any]:
    """Returns the measurements of benchmarks/checkpointing_switches.py, by model."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["models"]
    return found


def ratios(found: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Returns for each switch that ran the plan's peak beside its own, by model and switch; infinite without a plan."""
    return {
        (name, switch): one["ours"]["allocator_peak_bytes"] / one["allocator_peak_bytes"]
        if one["ours"]
        else float("inf")
        for name, model in found.items()
        for switch, one in model["switches"].items()
    }


def divided(model: Mapping[str, Any]) -> tuple[float, float | None]:
    """Returns how many times less activations the plan with a third more FLOPs has; and with a loss in chunks too."""
    plan = model["a third more flops"]
    head = plan.get("with linear_cross_entropy")
    return _activations(model["plain"]) / _activations(plan), (
        None if head is None else _activations(model["plain"]) / _activations(head)
    )


def text(found: Mapping[str, Any]) -> str:
    """Returns both tables, and a paragraph that counts."""
    measured = ratios(found)
    above = {key: one for key, one in measured.items() if one > 1}
    lower = sum(one <= 0.85 for one in measured.values())
    failed = sum(len(model["failed"]) for model in found.values())
    names = "; ".join(f"{name}, {switch}: {one - 1:+.1%}" for (name, switch), one in above.items())
    counts = (
        f"Of {len(measured)} switches and policies that ran ({failed} failed), plans are not above "
        f"{len(measured) - len(above)}, and at least 15% below {lower}. Above: {names or 'none'}."
    )
    return "\n\n".join([_switches(found), counts, _division(found)]) + "\n"


def _switches(found: Mapping[str, Any]) -> str:
    heads = ["model", "plain, MiB", "default plan", "own switch / plan", "every block / plan", "every second / plan"]
    heads += ["selective / plan", "checkpoint_sequential / plan", "planning, s"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, model in found.items():
        own = next((one for one in _OWN if one in model["switches"] or one in model["failed"]), "")
        cells = [_beside(model, switch) for switch in (own, *_POLICIES)]
        seconds = f"{model['default']['processor_seconds']:.1f}"
        plain = f"{_mib(model['plain']):,.0f}"
        lines.append([name, plain, _cost(model["default"], model["plain"]), *cells, seconds])
    return _lines(lines)


def _division(found: Mapping[str, Any]) -> str:
    lines = [
        ["model", "FLOPs", "less activation memory", "with `linear_cross_entropy`"],
        ["---", "---:", "---:", "---:"],
    ]
    for name, model in found.items():
        alone, chunked = divided(model)
        flops = model["a third more flops"]["flops"] / model["plain"]["flops"]
        lines.append([name, f"{flops:.2f}x", f"{alone:.1f}x", "" if chunked is None else f"{chunked:.1f}x"])
    return _lines(lines)


def _beside(model: Mapping[str, Any], switch: str) -> str:
    if switch in model["failed"]:
        return "fails"
    if switch not in model["switches"]:
        return ""
    one = model["switches"][switch]
    ours = f"{_mib(one['ours']):,.0f}" if one["ours"] else "none"
    return f"{_cost(one, model['plain'])} / {ours}"


def _cost(one: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    return f"{_mib(one):,.0f} ({one['operations'] / plain['operations']:.2f}x)"


def _mib(one: Mapping[str, Any]) -> float:
    return float(one["allocator_peak_bytes"]) / 2**20


def _activations(one: Mapping[str, Any]) -> int:
    return int(one["peak_bytes"]) - int(one["static_bytes"])


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shown(page: str) -> str:
    """Returns the part of the page that is made from the measurements."""
    return page.partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Write the tables of the measurements into the page."""
    before, _, rest = PAGE.read_text("utf-8").partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}{text(models())}{_END}{rest.partition(_END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
