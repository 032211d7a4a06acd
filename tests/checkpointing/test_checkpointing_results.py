"""The committed results of the benchmark support the claims of the docs, and the code reproduces them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_memtools.checkpointing.chains import depths, find_chains
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.checkpoint_plan import chain_plans
from lightning_memtools.checkpointing.optimal_ranges import OptimalRanges
from lightning_memtools.checkpointing.step_profile import predict, profile_step
from tests.checkpointing_docs import WANTED, divided, models, off_the_allocator, ratios, sentences, shown, texts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DOCS = BENCHMARKS.parent / "docs"
RESULTS = json.loads((BENCHMARKS / "results" / "checkpointing.json").read_text())
FRONTIER = RESULTS["frontier"]
EIGHT = (
    *("MLP", "VGG-16 features", "AlexNet", "conv-BN net"),
    *("encoder", "ResNet-50", "MobileNetV2", "unequal chain"),
)


def headline(**wanted):
    (found,) = (one for one in RESULTS["headline"] if wanted.items() <= one.items())
    return found


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_48_encoder_blocks_train_a_batch_ten_times_as_large(dropout, activation):
    found = headline(dropout=dropout, activation=activation, memory_budget=None, planned_for_batch=256)
    assert found["plain"]["kib_per_sample"] / found["planned"]["kib_per_sample"] >= 12
    assert found["planned"]["flops_per_sample"] / found["plain"]["flops_per_sample"] <= 1.33
    assert found["planned"]["largest_batch"] >= 10 * found["plain"]["largest_batch"]


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_a_small_budget_divides_the_memory_per_sample_by_sixteen(dropout, activation):
    found = headline(dropout=dropout, activation=activation, memory_budget=0.05)
    assert found["plain"]["kib_per_sample"] / found["planned"]["kib_per_sample"] >= 16
    assert found["planned"]["flops_per_sample"] / found["plain"]["flops_per_sample"] <= 1.7


@pytest.mark.parametrize(
    ("name", "least"),
    [("GPT-2 small", 12), ("BERT base", 12), ("Llama 1B, batch of 4", 9.5), ("Llama 1B, batch of 8", 11)],
)
def test_language_models_need_a_tenth_with_their_loss_in_chunks(name, least):
    found = RESULTS["language_models"][name]
    plain, lowest = found["plain"], found["auto, a third more flops"]
    assert len(lowest["heads"]) == 1
    gain, kept = (
        (plain["peak_bytes"] - plain["static_bytes"]) / (one["peak_bytes"] - one["static_bytes"])
        for one in (lowest, found["keep, a third more flops"])
    )
    assert gain >= least
    assert gain > 1.7 * kept
    assert lowest["flops"] <= 1.33 * plain["flops"]
    for one in found.values():
        assert one["allocator_peak_bytes"] == pytest.approx(one["peak_bytes"], rel=0.01)


@pytest.mark.parametrize("name", EIGHT)
def test_no_chunk_count_and_no_uniform_segments_are_better(name):
    found = FRONTIER[name]
    assert found["not_matched"] == []
    assert found["matched_or_beaten"] == found["baselines"] > 0


def test_the_lowest_peak_at_the_same_operations_is_lower_on_most_models():
    lower = [
        n for n in EIGHT if FRONTIER[n]["ours_at_its_operations_bytes"] < FRONTIER[n]["lowest_baseline"]["peak_bytes"]
    ]
    assert len(lower) >= 5
    assert all(FRONTIER[name]["strictly_lower"] >= FRONTIER[name]["baselines"] // 3 for name in EIGHT)


def test_planning_takes_less_than_five_seconds():
    found = dict(RESULTS["planning_seconds"])
    assert found.pop("HRNet-W48 (timm)")["processor"] < 10
    assert set(found) == {"chain of 100 layers", "ResNet-152", "GPT-2 small", "ViT-B/16 (timm)", "Swin-T (timm)"}
    assert all(one["processor"] < 5 for one in found.values())


def test_the_time_of_planning_grows_no_faster_than_the_number_of_layers():
    found = RESULTS["planning_by_length"]
    seconds = {int(n): one["processor_seconds"] for n, one in found.items()}
    assert set(seconds) == {20, 200, 400, 2000}
    assert seconds[2000] < 6 * seconds[400]
    assert (seconds[400] < 5, seconds[2000] < 20) == (True, True)
    assert all(one["mib_more"] < 500 for one in found.values())
    # The longer a chain of equal layers is, the smaller is the share of it that a plan needs.
    shares = [found[str(n)]["peak_share"] for n in sorted(seconds)]
    assert shares == sorted(shares, reverse=True)
    assert all(one["extra_operations"] <= 0.33 for one in found.values())


def test_the_batch_gained_on_real_models_is_reported():
    gained = RESULTS["gained_with_default_arguments"]
    assert set(gained) == {"ResNet-50", "ViT-S/16 (timm)", "VGG-16"}
    assert all(one["refused"] is None and one["extra_operations"] <= 0.33 for one in gained.values())
    assert all(one["planned"]["largest_batch"] > one["plain"]["largest_batch"] for one in gained.values())


def test_a_plan_reaches_lower_peaks_than_the_budgets_of_torch_compile():
    rows = json.loads((BENCHMARKS / "results" / "checkpointing_compiled.json").read_text())["rows"]
    assert rows[0]["budget"] == 1
    assert rows[0]["planned"]["flops"] == rows[0]["torch_compile"]["flops"]
    ours = min(row["planned"]["activation_bytes"] for row in rows if row["planned"] is not None)
    theirs = min(row["torch_compile"]["activation_bytes"] for row in rows)
    assert ours < theirs


def test_the_committed_figures_are_what_the_code_gives(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from checkpointing_models import conv_bn, step_of  # noqa: PLC0415, found only now

    found = FRONTIER["conv-BN net"]
    model = conv_bn()
    step = step_of(model, (16, 3, 64, 64))
    chains = depths(find_chains(model, CheckpointOptions.parse(bn_dropout="recompute")))[0]
    measured = profile_step(step, chains)
    assert measured.plain.peak_bytes == found["plain_peak_bytes"]
    assert measured.plain.operations == found["plain_operations"]
    least = found["lowest_baseline"]
    planner = OptimalRanges(measured.units, int(1.02 * measured.plain.peak_bytes))
    ranges = planner.best(least["peak_bytes"])
    assert ranges is not None
    ours = predict(step, chain_plans(measured, chains, ranges))
    assert ours.peak_bytes <= least["peak_bytes"]
    assert ours.operations < least["operations"]


def test_the_page_shows_what_was_measured_beside_switches_and_bit_for_bit():
    assert shown() == texts()
    for name, said in sentences().items():
        page = " ".join((DOCS / f"{name}.md").read_text("utf-8").split())
        assert [one for one in said if one not in page] == []


def test_plans_are_beside_or_below_what_users_have():
    measured = ratios(models())
    assert {name for name, _ in measured} == set(WANTED)
    assert max(measured.values()) <= 1
    assert sum(one <= 0.85 for one in measured.values()) >= 0.5 * len(measured)


def test_predicted_peaks_are_within_a_percent_of_pytorchs_allocator():
    off = [one for name in WANTED for one in off_the_allocator(models()[name])]
    assert len(off) > 150
    assert max(map(abs, off)) < 0.01


def test_plans_are_below_nearly_all_budgets_of_torch_compile_on_whole_models():
    measured = {
        (name, budget): one
        for name, model in models().items()
        for budget, one in model.get("partitions", {}).items()
        if "failed" not in one
    }
    assert {name for name, _ in measured} == set(WANTED)
    for (name, _), one in measured.items():
        assert one["ours"]["flops"] <= one["flops"] + 0.01 * models()[name]["plain"]["flops"]
    peaks = "allocator_peak_bytes"
    above = {key: ratio for key, one in measured.items() if (ratio := one["ours"][peaks] / one[peaks]) > 1}
    # It may keep the result of any operator of a block, where a plan keeps those of matrix products.
    assert len(above) <= 0.05 * len(measured)
    assert max(above.values(), default=1) < 1.03


def test_planning_takes_seconds_for_the_models_that_people_train():
    seconds = {name: model["default"]["processor_seconds"] for name, model in models().items()}
    assert seconds.pop("HRNet-W48 (timm)") < 10
    assert max(seconds.values()) < 5


@pytest.mark.parametrize(
    "name", ["GPT-2 small", "BERT base", "Llama 0.25B", "T5 small", "ViT-B/16 (timm)", "ViT-B/16 (transformers)"]
)
def test_transformers_need_an_eighth_of_the_activations_where_logits_do_not_bound_them(name):
    model = models()[name]
    plan = model["a third more flops"]
    for one in (plan, plan.get("with linear_cross_entropy", plan)):
        assert one["flops"] <= 1.33 * model["plain"]["flops"]
    assert max(one for one in divided(model) if one is not None) >= 8


@pytest.mark.parametrize("name", ["GPT-2 small", "BERT base", "ViT-B/16 (timm)", "ConvNeXt-T (timm)"])
def test_offload_takes_less_time_than_recomputation_within_the_same_memory(name):
    """By the model of the time: no GPU has confirmed it. The memory is that of PyTorch's own allocator."""
    alone, both = (RESULTS["offload"][name][how] for how in ("recomputation", "with offload"))
    assert both["host_bytes"] > 0
    assert both["extra_operations"] < alone["extra_operations"]
    assert both["relative_time"] < alone["relative_time"]
    for one in (alone, both):
        assert one["allocator_peak_bytes"] == pytest.approx(one["peak_bytes"], rel=0.01)
    # Within the budget, twice what the default plan takes; recomputation came within 2% of it.
    size = {how: one["peak_bytes"] - one["static_bytes"] for how, one in (("alone", alone), ("both", both))}
    assert size["both"] <= 1.02 * size["alone"]
