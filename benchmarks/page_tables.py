"""Writes the tables of the manual from the summaries in results/ and the list of GPUs.

    python benchmarks/page_tables.py

A page of docs/ says where: what stands between `<!-- table: NAME -->` and `<!-- end -->` is replaced. A test says that
no page is stale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from lightning_memtools.memory.sizes import format_size, known_gpus

ROOT = Path(__file__).parents[1]
_MARKED = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Rows = Iterable[Iterable[object]]


def results(name: str) -> Any:
    """Return a committed summary."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def table(heads: str, rows: Rows) -> str:
    """Return a table: the heads divided by |, all but the first aligned to the right unless they end in <."""
    names = heads.split(" | ")
    marks = ["---" if at == 0 or name.endswith("<") else "---:" for at, name in enumerate(names)]
    lines = [[name.removesuffix(" <") for name in names], marks, *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def gpu_names() -> str:
    gpus = sorted(known_gpus(), key=lambda gpu: (gpu.usable_bytes, gpu.name))
    rows = (
        (gpu.name, format_size(gpu.usable_bytes) + " *" * gpu.estimated, gpu.compute_capability, gpu.multiprocessors)
        for gpu in gpus
    )
    return table("name | usable | compute capability | multiprocessors", rows)


def truth() -> str:
    found = results("truth")["simulation"]
    rows = []
    for name in ("allocated", "reserved"):
        one = found[name]
        shares = (f"{one[key]}%" for key in ("equal_pct", "within_half_percent_pct", "within_one_percent_pct"))
        rows.append((f"an estimate: {name}", found["compared"], *shares, f"{one['largest_error_pct']}%"))
    return table("peak of | runs | equal to the byte | within 0.5% | within 1% | largest error", rows)


def differences() -> str:
    found = results("truth")["simulation"]["different"]
    rows = []
    for reason in {one["reason"]: None for one in found.values()}:
        same = {key: one for key, one in found.items() if one["reason"] == reason}
        names = list(dict.fromkeys(key.split(",")[0] for key in same))
        named = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
        worst = (
            max((one[f"{name}_error_pct"] for one in same.values()), key=abs) for name in ("allocated", "reserved")
        )
        rows.append((named, len(same), *(f"{error:+.2f}%" for error in worst), reason))
    return table("model | runs | allocated | reserved | cause <", rows)


def published() -> str:
    def cells(name: str, one: dict[str, Any]) -> tuple[object, ...]:
        sizes = (one["published_gb"], one["dry_run_gb"])
        off = "not comparable" if not one["comparable"] else "" if sizes[0] is None else f"{one['error_pct']:+.2f}%"
        gb = ("out of memory" if size is None else f"{size:.2f}" for size in sizes)
        return (name.removesuffix(".yaml"), one["devices"], *gb, off)

    sizes = ("published_gb", "dry_run_gb")  # both None where both are out of memory
    cases = {
        name: one for name, one in results("litgpt")["cases"].items() if any(one[size] is not None for size in sizes)
    }
    rows = (cells(name, one) for name, one in cases.items())
    return table("config | GPUs | published, GB | dry run, GB | difference", rows)


def batch_size() -> str:
    found = results("batch_size")
    rows = []
    for tool in ("BatchSizeTuner", "BatchSizeFinder power", "BatchSizeFinder binsearch"):
        one = found[tool]
        shares = (f"{one[key]:.1f}%" for key in ("least_share_pct", "median_share_pct"))
        rows.append((tool, *shares, one["over_the_maximum"], one["fits_that_failed"], one["median_trials"]))
    heads = "of the true maximum | least | median | times above it | fits that it ended | median of trials"
    return table(heads, rows)


def switches() -> str:
    def cell(model: dict[str, Any], name: str) -> str:
        if name not in model["switches"]:
            return "fails" if name in model["failed"] else ""
        one = model["switches"][name]
        plan = "none" if one["plan_mib"] is None else f"{one['plan_mib']:,.0f}"
        return f"{one['mib']:,.0f} ({one['operations']:.2f}x) / {plan}"

    rows = []
    for name, model in results("checkpointing_switches")["switches"]["models"].items():
        default, third = model["default"], model["a third more flops"]
        own = next((one for one in model["switches"] if one.endswith("()")), "")
        of_switches = (cell(model, one) for one in (own, "every block"))
        plan, gain = f"{default['mib']:,.0f} ({default['operations']:.2f}x)", f"{third['activations_divided_by']:.1f}x"
        rows.append((name, f"{model['plain']:,.0f}", plan, *of_switches, gain, default["planning_seconds"]))
    heads = "model | plain, MiB | default plan | own switch / plan | every block / plan"
    return table(f"{heads} | less activation memory | planning, s", rows)


def headline() -> str:
    rows = []
    for one in results("checkpointing_switches")["headline"]["rows"]:
        largest = [f"{size:,}" for size in one["largest_batch"] or ()] or ["", ""]
        kib = (f"{size:,}" for size in one["kib_per_sample"])
        ratios = (
            f"{one[key]:.1f}x" if key == "memory_ratio" else f"{one[key]:.2f}x"
            for key in ("memory_ratio", "flops_ratio")
        )
        rows.append((one["dropout"], one["memory_budget"] or "default", *kib, *ratios, *largest))
    heads = "dropout | `memory_budget` | KiB per sample | with the plan | less memory | FLOPs"
    return table(f"{heads} | largest batch | with the plan", rows)


def language_models() -> str:
    found = {name: one for name, one in results("checkpointing_switches")["language models"].items() if "auto" in one}

    def cell(one: dict[str, Any]) -> str:
        return f"{one['activations_divided_by']:.1f}x ({one['flops']:.2f}x)"

    rows = ((name, f"{one['plain_mib']:,.0f}", cell(one["auto"]), cell(one["keep"])) for name, one in found.items())
    return table("model | plain, MiB | less activation memory (FLOPs) | with all logits at once (FLOPs)", rows)


def halt_on_nan() -> str:
    found = results("halt_on_nan")
    rows = []
    for check in [
        name for name, one in found["AdamW"]["4x64"].items() if isinstance(one, dict) and "median" not in one
    ]:
        key = "whole_step_cpu" if check == "detect_anomaly" else "inside_its_hooks_cpu"
        medians = (
            100 * found[optimizer][shape][check][key]["median"]
            for optimizer in ("AdamW", "AdamW(fused=True)")
            for shape in ("4x64", "1x16")
        )
        rows.append((check, *(f"{median:.0f}%" if median >= 10 else f"{median:.2g}%" for median in medians)))
    heads = "check | AdamW, 4 x 64 | AdamW, 1 x 16 | fused, 4 x 64 | fused, 1 x 16"
    return table(heads, rows)


def step_cost() -> str:
    steps = results("step_cost")["steps"]
    cases = [case for case in steps["1 ms"] if case != "bare_step_ms"]
    rows = ((case, *(f"{step[case]['median']:.2f}" for step in steps.values())) for case in cases)
    return table(" | ".join(["a step with", *(f"of {size}" for size in steps)]), rows)


def gpu() -> str:
    """Estimates beside a real GPU, by the kind of network."""
    convolutional = {"resnet50", "mobilenet_v2", "convnext_tiny", "dla34"}
    groups: dict[str, list[dict[str, float]]] = {
        "attention, norms, Transformers, perceptrons": [],
        "convolutional": [],
        "recurrent": [],
    }
    for key, case in results("gpu")["NVIDIA H100 80GB HBM3"]["estimates"]["cases"].items():
        name = key.split(",")[0]
        group = (
            "convolutional" if name in convolutional else "recurrent" if name in {"lstm", "gru"} else next(iter(groups))
        )
        groups[group].append(case)
    rows = []
    for group, cases in groups.items():
        off = [[case[f"{name}_error_pct"] for case in cases] for name in ("allocated", "reserved")]
        worst = (f"{max(each, key=abs):+.1f}%" for each in off)
        medians = (f"{median(map(abs, each)):.2f}%" for each in off)
        rows.append((group, len(cases), *(cell for pair in zip(medians, worst, strict=True) for cell in pair)))
    return table("networks | runs | allocated: median error | worst | reserved: median error | worst", rows)


def others() -> str:
    nan, plans, own = results("nan_cause"), results("packages"), results("oom_recovery")["own_us_per_step"]
    ours, theirs, gpus = nan["HaltOnNaN"], nan["detect_anomaly"], results("truth")["gpus"]
    equal, off = ([gpus[name][key] for name in ("allocated", "reserved")] for key in ("equal", "largest_error_pct"))
    truth = f"{equal[0]} allocated and {equal[1]} reserved peaks of {gpus['compared']} are equal to the byte"
    cause = f"in {ours['right']} of {nan['failing']} models (`detect_anomaly`: {theirs['right']})"
    alarms = f"{len(ours['false_alarms'])} false alarms in {nan['healthy']} healthy ones"
    cost = f"{own['100 parameters']:.0f} microseconds with 100 parameters, {own['1000 parameters']:.0f} with 1000"
    planned = f"{plans['planned']} have a plan, and {plans['nothing_worth_recomputing']} nothing worth recomputing"
    near = f"peaks are within 1% of the measured ones for {plans['within_1_pct']} of {plans['predicted']}"
    near += "; a CPU's LSTM takes up to 4.4 times as much"
    frontier = [one for one in results("checkpointing_switches")["frontier"].values() if "others" in one]
    ways, matched, lower = (sum(one[key] for one in frontier) for key in ("others", "matched", "strictly_lower"))
    rows = {
        "truth.py --gpus": f"on {gpus['gpus']} GPUs, {truth}, the others within {off[0]}% and {off[1]}%",
        "nan_cause.py": f"HaltOnNaN names the operation that made the NaN {cause}, with {alarms}",
        "oom_recovery.py": f"OOMRecovery takes {cost} of a step in which nothing happens",
        "checkpointing_frontier.py frontier": f"of {ways} ways to use `checkpoint_sequential` or uniform segments on "
        f"{len(frontier)} models, {matched} have a plan of no more memory and operations, {lower} one of less memory",
        "packages.py": f"of {len(plans['models'])} models of {plans['packages']} public packages, {planned}; {near}",
    }
    return table("script | result <", ((f"`{script}`", result) for script, result in rows.items()))


TABLES: dict[str, Callable[[], str]] = {
    make.__name__.replace("_", " "): make
    for make in (
        *(gpu_names, truth, differences, published, batch_size, switches, headline),
        *(language_models, halt_on_nan, step_cost, gpu, others),
    )
}


def pages() -> dict[Path, str]:
    """Return the text of each page that has tables, with the tables of today."""
    found = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text("utf-8")
        made = _MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", text)
        if "<!-- table: " in text:
            found[path] = made
    return found


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, "utf-8")
