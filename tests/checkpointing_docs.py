"""What two pages of docs say of measured plans. Run as a program, it updates them.

python -m tests.checkpointing_docs
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_memtools.reporting.phrases import in_series

ROOT = Path(__file__).parents[1]
PAGES = {
    name: ROOT / "docs" / f"{name}.md" for name in ("gradient-checkpointing", "checkpointing-compared", "host-offload")
}
RESULTS = ROOT / "benchmarks" / "results"
_OWN = ("gradient_checkpointing_enable()", "set_grad_checkpointing()")
_POLICIES = (
    "every block",
    "every second block",
    "every block, selective by operator",
    "checkpoint_sequential",
)
WANTED = (
    *("GPT-2 small", "BERT base", "Llama 0.25B", "T5 small", "ViT-B/16 (transformers)", "Swin-T (transformers)"),
    *("ViT-B/16 (timm)", "Swin-T (timm)", "ConvNeXt-T (timm)", "EfficientNet-B0 (timm)", "RegNetY-4GF (timm)"),
    *("DenseNet-121 (timm)", "HRNet-W48 (timm)", "ResNet-50", "DeepLabV3 (ResNet-50)", "U-Net"),
)
_TRANSFORMERS = WANTED[:8]


def models(name="checkpointing_switches"):
    """Returns the measurements of one of the benchmarks, by model."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["models"]


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


def texts() -> dict[str, dict[str, str]]:
    """Returns the parts of each page that are made from measurements, by page and name."""
    gains = {"gains": _of_gains(), "language models": _of_language_models()}
    compared = {
        "segments": _of_segments(),
        "switches": _of_switches(models()),
        "bit for bit": _of_bits(models("checkpointing_bitwise")),
    }
    return dict(zip(PAGES, (gains, compared, {"offload": _of_offload()}), strict=True))


def shown() -> dict[str, dict[str, str]]:
    """Returns these parts as the pages have them."""
    found: dict[str, dict[str, str]] = {}
    for name, parts in texts().items():
        page = PAGES[name].read_text("utf-8")
        found[name] = {part: page.partition(_begin(part))[2].partition(_end(part))[0] for part in parts}
    return found


def sentences() -> dict[str, list[str]]:
    """Returns what other pages say of these measurements, by page."""
    measured = ratios(models()).values()
    planned = [one for one in models("checkpointing_bitwise").values() if one["refused"] is None]
    near = sum(abs(one["predicted_peak_bytes"] / one["measured_peak_bytes"] - 1) <= 0.01 for one in planned)
    off = [one for model in models().values() for one in off_the_allocator(model)]
    planning = json.loads((RESULTS / "checkpointing.json").read_text(encoding="utf-8"))["planning_seconds"]
    seconds = {name: f"{one['processor']:.1f} s" for name, one in planning.items()}
    return {
        "gradient-checkpointing": [
            (
                f"planning: {seconds['GPT-2 small']} of a processor for GPT-2 small, {seconds['ViT-B/16 (timm)']} for "
                f"ViT-B/16, {seconds['Swin-T (timm)']} for Swin-T, {seconds['ResNet-152']} for ResNet-152, "
                f"{seconds['HRNet-W48 (timm)']} for HRNet-W48, {seconds['chain of 100 layers']} for a chain of 100 "
                "layers"
            ),
            f"not above {sum(one <= 1 for one in measured)} of {len(measured)})",
            f"{len(planned)} of {len(planned)} models trained with a plan bit for bit as without",
            f"within 1% in {near} of {len(planned)} models of other libraries",
            f"within {max(map(abs, off)):.1%} of the peaks of PyTorch's own allocator",
        ],
        "measurements": [f"{len(planned)} of {len(planned)} foreign models bit for bit"],
    }


def in_all_styles(model: Mapping[str, Any]) -> bool:
    """Returns whether a model was trained to the same bits in all three styles of steps and both precisions."""
    return all(
        model.get(f"{precision}_differs{style}") == {}
        for precision in ("fp32", "bf16")
        for style in ("", "_as_of_transformers", "_in_lightning")
    )


def _of_language_models() -> str:
    """Returns the table of language models with default arguments, with and without their loss in chunks."""
    results = json.loads((RESULTS / "checkpointing.json").read_text(encoding="utf-8"))["language_models"]
    rows = [["model", "plain, MiB", "with the plan", "less memory", "FLOPs", 'less with `loss_head="keep"`']]
    rows.append(["---", *["---:"] * 5])
    for name, one in results.items():
        plain, planned, kept = (_activations(one[key]) for key in ("plain", "auto", "keep"))
        flops = one["auto"]["flops"] / one["plain"]["flops"]
        sizes = [f"{size / 2**20:,.0f}" for size in (plain, planned)]
        rows.append([name, *sizes, f"{plain / planned:.1f}x", f"{flops:.2f}x", f"{plain / kept:.1f}x"])
    costs = [cost for one in results.values() for cost in one.values()]
    off = max(abs(one["allocator_peak_bytes"] / one["peak_bytes"] - 1) for one in costs)
    return (
        "Activation memory with default arguments, of models of transformers as they are, in float32 with AdamW (fused "
        "for the 1B model). The peak of PyTorch's own allocator in the dry run is within "
        f"{off:.2%} of each prediction:\n\n"
        f"{_lines(rows)}\n"
    )


def _of_offload() -> str:
    """Returns the table of plans within a budget, with and without host memory."""
    results = json.loads((RESULTS / "checkpointing.json").read_text(encoding="utf-8"))["offload"]
    rows = [["model", "plain, MiB", "within, MiB", "recomputation: time", "with offload: time", "on the host, MiB"]]
    rows.append(["---", *["---:"] * 5])
    for name, one in results.items():
        alone, both = one["recomputation"], one["with offload"]
        sizes = [f"{_activations(one[key]) / 2**20:,.0f}" for key in ("plain", "recomputation")]
        times = [f"{each['relative_time']:.2f}" for each in (alone, both)]
        rows.append([name, *sizes, *times, f"{both['host_bytes'] / 2**20:,.0f}"])
    return (
        "Within twice the activation memory of the default plan, in float32 with AdamW; times are multiples of the "
        f"plain step's, by the model, for an A100 on PCIe 4.0:\n\n{_lines(rows)}\n"
    )


def _of_gains() -> str:
    """Returns the tables of the encoder with both budgets and of the models with default arguments."""
    results = json.loads((RESULTS / "checkpointing.json").read_text(encoding="utf-8"))
    head = ["activation", "dropout", "KiB per sample", "with the plan", "less memory", "FLOPs"]
    whole, small = (
        [[*columns], ["---", *["---:"] * (len(columns) - 1)]]
        for columns in ([*head, "largest batch", "with the plan", "larger"], head)
    )
    for one in results["headline"]:
        plain, planned = one["plain"], one["planned"]
        row = [{"gelu": "GELU", "relu": "ReLU"}[one["activation"]], f"{one['dropout']:g}"]
        row += [f"{kind['kib_per_sample']:,.0f}" for kind in (plain, planned)]
        row += [f"{one['memory_ratio']:.1f}x", f"{one['flops_ratio']:.2f}x"]
        if one["memory_budget"] is not None:
            small.append(row)
        elif one["planned_for_batch"] == max(other["planned_for_batch"] for other in results["headline"]):
            largest = [f"{kind['largest_batch']:,}" for kind in (plain, planned)]
            whole.append([*row, *largest, f"{one['batch_ratio']:.1f}x"])
    with_defaults = [
        ["model", "KiB per sample", "with the plan", "more operations", "largest batch", "with the plan", "larger"]
    ]
    with_defaults.append(["---", *["---:"] * 6])
    for name, one in results["gained_with_default_arguments"].items():
        sizes, batches = (
            [f"{one[kind][key]:,.0f}" for kind in ("plain", "planned")] for key in ("kib_per_sample", "largest_batch")
        )
        with_defaults.append([name, *sizes, f"{one['extra_operations']:.0%}", *batches, f"{one['batch_ratio']:.1f}x"])
    return (
        f"{_lines(whole)}\n\nWith `memory_budget=0.05`:\n\n{_lines(small)}\n\n"
        "Default arguments on real models at 224 x 224, planned for a batch of 64; largest batch on 24 GiB:\n\n"
        f"{_lines(with_defaults)}\n"
    )


def _of_segments() -> str:
    """Returns the table of plans beside checkpoint_sequential and uniform segments, and a paragraph below it."""
    found = json.loads((RESULTS / "checkpointing.json").read_text(encoding="utf-8"))["frontier"]
    heads = ["model", "plain, MiB", "lowest of the others, MiB", "its operations", "ours within these, MiB"]
    lines = [[*heads, "matched", "strictly lower", "fails"], ["---", "---:", "---", *["---:"] * 5]]
    for name, one in found.items():
        lowest = one["lowest_baseline"]
        lines.append(
            [
                name,
                f"{one['plain_peak_bytes'] / 2**20:,.0f}",
                f"{lowest['peak_bytes'] / 2**20:,.0f} ({lowest['name']})",
                f"{lowest['operations'] / one['plain_operations'] - 1:+.0%}",
                f"{one['ours_at_its_operations_bytes'] / 2**20:,.0f}",
                f"{one['matched_or_beaten']} of {one['baselines']}",
                str(one["strictly_lower"]),
                str(sum(one["baselines_that_fail"].values())),
            ]
        )
    matched, others, lower = (
        sum(one[key] for one in found.values()) for key in ("matched_or_beaten", "baselines", "strictly_lower")
    )
    errors = sorted(one["largest_error_of_the_memory_model"] for one in found.values())
    counts = (
        f"Of {others} ways in all, plans match or beat {matched}, and have a lower peak than {lower}. The memory model "
        f"that chooses the plans differs from the traced peak of a plan by at most {errors[-1]:.1%}, and for all "
        f"models but one by at most {errors[-2]:.1%}."
    )
    return f"{_lines(lines)}\n\n{counts}\n"


def _of_bits(found: Mapping[str, Any]) -> str:
    planned = {name: one for name, one in found.items() if one["refused"] is None}
    off = {name: one["predicted_peak_bytes"] / one["measured_peak_bytes"] - 1 for name, one in planned.items()}
    far = "; ".join(f"{name} {one:+.1%}" for name, one in off.items() if abs(one) > 0.01)
    return (
        f"`benchmarks/checkpointing_bitwise.py` trained {len(found)} models of transformers, timm and torchvision in "
        "small configurations for three steps with and without a plan, with dropout and stochastic depth, in fp32 and "
        f"in bf16-mixed. {len(planned)} of them had a plan; the others have next to no activations beside their "
        f"weights. All {len(planned)} had the same losses, gradients, weights, buffers and random numbers bit for bit. "
        "Three styles of steps were tried: a plain loop; the order of transformers' Trainer, with two micro-batches, "
        "clipping, AdamW and a schedule; and a Lightning Trainer with the callback. "
        f"{sum(map(in_all_styles, planned.values()))} models ran in all three, the others in those that were tried and "
        "had a plan. The predicted peak equals that of the simulated allocator to the byte for "
        f"{sum(one == 0 for one in off.values())} of the {len(planned)} models, and is within 1% of it for "
        f"{sum(abs(one) <= 0.01 for one in off.values())}{f' (the others: {far})' if far else ''}.\n"
    )


def _of_switches(found: Mapping[str, Any]) -> str:
    """Returns the tables, and a paragraph that counts."""
    measured = ratios(found)
    above = {key: one for key, one in measured.items() if one > 1}
    lower = sum(one <= 0.85 for one in measured.values())
    failed = sum(len(model["failed"]) for model in found.values())
    names = "; ".join(f"{name}, {switch}: {one - 1:+.1%}" for (name, switch), one in above.items())
    missing = ", ".join(name for name in WANTED if name not in found)
    counts = (
        f"{len(measured)} switches and policies ran, and {failed} failed. The peak of the plan is no higher for "
        f"{len(measured) - len(above)} of them, and at least 15% lower for {lower}."
        f"{f' It is higher for {names}.' if names else ''}"
        f"{f' Not measured: {missing}.' if missing else ''}"
    )
    return (
        "\n\n".join([_switches(found), counts, _partitions(found), _division(found), _eighths(found), _off(found)])
        + "\n"
    )


def _switches(found: Mapping[str, Any]) -> str:
    heads = ["model", "plain, MiB", "default plan", "own switch / plan", "every block / plan", "every second / plan"]
    heads += ["selective / plan", "checkpoint_sequential / plan", "planning, s"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, model in _in_order(found).items():
        own = next((one for one in _OWN if one in model["switches"] or one in model["failed"]), "")
        cells = [_beside(model, switch) for switch in (own, *_POLICIES)]
        seconds = f"{model['default']['processor_seconds']:.1f}"
        plain = f"{_mib(model['plain']):,.0f}"
        lines.append([name, plain, _cost(model["default"], model["plain"]), *cells, seconds])
    return _lines(lines)


def _division(found: Mapping[str, Any]) -> str:
    lines = [
        ["model", "less activation memory (FLOPs)", "with `linear_cross_entropy` (FLOPs)"],
        ["---", "---:", "---:"],
    ]
    for name, model in _in_order(found).items():
        alone, chunked = divided(model)
        third = model["a third more flops"]
        flops, head = (
            one["flops"] / model["plain"]["flops"] for one in (third, third.get("with linear_cross_entropy", third))
        )
        other = "" if chunked is None else f"{chunked:.1f}x ({head:.2f}x)"
        lines.append([name, f"{alone:.1f}x ({flops:.2f}x)", other])
    return _lines(lines)


def _partitions(found: Mapping[str, Any]) -> str:
    """Returns the table of torch.compile's budgets, and how many of them no plan is above."""
    measured = {name: model["partitions"] for name, model in _in_order(found).items() if "partitions" in model}
    budgets = [*next(iter(measured.values()))]
    lines = [["model", *(f"budget {one} / plan" for one in budgets)], ["---", *["---:"] * len(budgets)]]
    for name, ways in measured.items():
        cells = [_divided_by_torch(ways[budget], found[name]["plain"]) for budget in budgets]
        lines.append([name, *cells])
    return f"{_lines(lines)}\n\n{partition_counts(found)}"


def partition_counts(found: Mapping[str, Any]) -> str:
    """Returns a sentence on how many of torch.compile's budgets have a plan that is not above them."""
    ran = [one for model in found.values() for one in model.get("partitions", {}).values() if "failed" not in one]
    lower = sum(one["ours"] is not None and _mib(one["ours"]) <= _mib(one) for one in ran)
    return f"For {lower} of {len(ran)} budgets of torch.compile, a plan with no more FLOPs has no higher peak."


def _divided_by_torch(one: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    if "failed" in one:
        return "fails"
    ours = f"{_mib(one['ours']):,.0f}" if one["ours"] else "none"
    return f"{_mib(one):,.0f} ({one['flops'] / plain['flops']:.2f}x) / {ours}"


def _eighths(found: Mapping[str, Any]) -> str:
    """Returns which transformers need at most an eighth of the activation memory, and how."""
    times = {name: divided(model) for name, model in _in_order(found).items() if name in _TRANSFORMERS}
    alone = [name for name, (plan, _) in times.items() if plan >= 8]
    bound = [name for name, (plan, head) in times.items() if plan < 8 <= (head or 0)]
    rest = [f"{name} ({max(plan, head or 0):.1f}x)" for name, (plan, head) in times.items() if max(plan, head or 0) < 8]
    return (
        f"Of the transformers, {in_series(alone)} need at most an eighth of the activation memory with the plan alone. "
        f"{in_series(bound)} do so with the other loss as well, because their logits limit what a plan can do. The "
        f"gain is smaller for {in_series(rest)}."
    )


def off_the_allocator(model: Mapping[str, Any]) -> list[float]:
    """Returns by what share the predicted peak of each step of a model is off that of PyTorch's own allocator."""
    third, switches = model["a third more flops"], model["switches"].values()
    steps = [model["plain"], model["default"], third, *switches, *(one["ours"] for one in switches if one["ours"])]
    if "with linear_cross_entropy" in third:
        steps.append(third["with linear_cross_entropy"])
    return [one["peak_bytes"] / one["allocator_peak_bytes"] - 1 for one in steps]


def _off(found: Mapping[str, Any]) -> str:
    off = [one for model in found.values() for one in off_the_allocator(model)]
    return (
        f"The predictions of these {len(off)} steps are at most {-min(off):.1%} below the peak of PyTorch's own "
        f"allocator, and at most {max(off):.1%} above it. {sum(one == 0 for one in off)} are equal to it to the byte."
    )


def _in_order(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in WANTED if name in found}


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


def _begin(name: str) -> str:
    return f"<!-- {name} -->\n"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->"


def main() -> None:
    """Write what is made from the measurements into the page."""
    for name, parts in texts().items():
        page = PAGES[name].read_text("utf-8")
        for part, text in parts.items():
            before, _, rest = page.partition(_begin(part))
            page = f"{before}{_begin(part)}{text}{_end(part)}{rest.partition(_end(part))[2]}"
        PAGES[name].write_text(page, "utf-8")


if __name__ == "__main__":
    main()
