"""docs/measurements.md and docs/growth.md say what benchmarks/results/ says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = {path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
PAGE = (ROOT / "docs" / "measurements.md").read_text("utf-8")
GROWTH = (ROOT / "docs" / "growth.md").read_text("utf-8")


def test_every_result_has_a_row_and_a_script():
    for name in RESULTS.keys() - {"growth"}:
        assert f"`{name}.py`" in PAGE, name
        assert (ROOT / "benchmarks" / f"{name}.py").is_file(), name


def test_the_figures_are_those_of_the_results():
    truth, calls = RESULTS["truth"]["summary"], RESULTS["callbacks"]
    on_cpu = RESULTS["truth_virtual_device"]["summary"]
    engines = [one["ratio"] for one in RESULTS["estimate_engines"]["processor_time"].values()]
    llama = RESULTS["dry_run"]["cases"]["Llama 2 7B, FSDP 2, 8 ranks of RTX 4090"]
    alone = RESULTS["dry_run"]["estimates"]["Llama 2 7B, FSDP 2, 8 ranks"]
    assert alone["peak_reserved"] == llama["peak_reserved"]["train"]
    large = RESULTS["halt_on_nan"]["AdamW"]["4x64"]["HaltOnNaN"]
    small = RESULTS["halt_on_nan"]["small network, AdamW: a step over a bare one"]["HaltOnNaN"]
    ours = [step["default_callbacks()"]["median"] for step in RESULTS["step_cost"]["steps"].values()]
    right = RESULTS["nan_cause"]["totals"]
    sizes, tab, start = RESULTS["batch_size"], RESULTS["memory_tab_load"], RESULTS["tensorboard_start"]
    logged = {name: one["median"] for name, one in calls["logged_step_us"].items()}
    theirs = logged["DeviceStatsMonitor"] / logged["both readings and bare logging of as many scalars"]
    files = RESULTS["lightning_tests"]["files"].values()
    assert not [one for one in files if one["tests"] == one["fail_without"] == 1]  # a file that did not end
    newly = [one["why"] for file in files for one in file["newly_fail"].values()]
    assert not [why for why in newly if why == "not sorted" or why.startswith("names this library")]
    plans = RESULTS["packages"]["summary"]
    slow, fast = (start[f"load_fast={how}"]["ratio until it listens"] for how in ("false", "true"))
    diffs = [RESULTS["memory_diff"][engine] for engine in ("simulation", "cuda")]
    assert [len(one["models"]) for one in diffs] == [10, 10]
    assert diffs[0]["found"] == diffs[1]["found"]
    plugin = RESULTS["pytest_start"]
    gpus, ampere = RESULTS["truth_gpus"]["summary"], RESULTS["truth_gpus"]["gpus"]
    older = {
        "T4 16GB",
        "V100 32GB",
        "V100 16GB",
        "P100 16GB",
        "Quadro RTX 8000 48GB",
        "RTX 2080 Ti 11GB",
        "GTX 1080 Ti 11GB",
    }
    newer = [one for name, one in ampere.items() if name not in older]
    assert {one["allocated_equal"] for one in newer} == {one["reserved_equal"] for one in newer} == {6}
    spikes = RESULTS["loss_spikes"]
    per_step = [
        one["us_per_step"]["median"]
        for size in ("2 thousand", "1 million")
        for one in spikes[f"{size} parameters"].values()
    ]
    copies = [one["us_per_copy"]["median"] / 1000 for one in spikes["1 million parameters"].values()]
    rows = (
        f"{gpus['allocated_equal']} of {gpus['compared']} peaks to the byte, all of those from Ampere on",
        f"the largest error is {gpus['largest_allocated_error_pct']}% | `truth_gpus.py`",
        f"{min(per_step):.0f} to {max(per_step):.0f} microseconds a step beside HaltOnNaN",
        f"million parameters {copies[0]:.1f} ms, one of all that a rollback needs {copies[1]:.1f} ms",
        f"takes {plugin['with over without']:.2f} times the processor time, two runs without",
        f"runs without it {plugin['without again over without']:.2f} times",
        f"in {diffs[0]['found']} of {diffs[0]['of']} changes of one line in ten models",
        f"to the byte in {truth['allocated']['equal_pct']}% of {truth['compared']} cases",
        f"reserved in {truth['reserved']['equal_pct']}%",
        f"to the byte in {on_cpu['allocated']['equal_pct']}% of {on_cpu['compared']} cases, reserved",
        f"takes {min(engines)} to {max(engines)} times the processor time",
        f"8 ranks: {llama['seconds']:.0f} s, {llama['host_bytes_peak'] / 1e9:.1f} GB",
        f"without a script: {alone['seconds']:.0f} s, {alone['host_bytes_peak'] / 1e9:.1f} GB, the same reserved",
        f"{calls['MemoryMonitor_logged_over_bare']['median']:.1f} times bare logging",
        f"`DeviceStatsMonitor` {theirs:.0f} times",
        f"{100 * large['inside_its_hooks_cpu']['median']:.0f}% of a step of 25 million parameters",
        f"a step of 0.7 ms takes {small['median']:.2f} times",
        f"takes {ours[0]:.2f} (1 ms), {ours[1]:.2f} (10 ms) and {ours[2]:.2f} times (60 ms) as long",
        f"in {right['HaltOnNaN']['right']} of {len(RESULTS['nan_cause']['failing'])} models",
        f"(`detect_anomaly`: {right['detect_anomaly']['right']})",
        f"{RESULTS['oom_recovery']['own_us_per_step']['100 parameters']:.0f} microseconds a step",
        f"at least {100 * sizes['least_share']:.1f}% of it in {sizes['runs']} searches",
        f"{RESULTS['checkpointing']['headline'][0]['memory_ratio']:.1f} times less activation memory",
        f"of {plans['models']} models of {plans['packages']} packages",
        f"{plans['planned']} are planned",
        f"{plans['nothing_worth_recomputing']} have nothing worth recomputing",
        f"within 1% of the measured ones for {plans['within_1_pct']} of {plans['predicted']}",
        f"a watched step takes {RESULTS['doctor']['watched']['ratio_of_medians']:.2f} times",
        f"of {sum(one['tests'] for one in files):,} in {len(files)} files, {len(newly)} fail that pass without",
        f"in {tab['seconds']['memory tab']['median']:.1f} s, {tab['ratio to an empty memory tab']:.2f} times an empty",
        f"{fast:.2f} times with the fast loader, {slow:.2f} times without",
    )
    for row in rows:
        assert row in PAGE, row


def test_the_page_of_published_peaks_says_what_was_measured():
    result = RESULTS["litgpt"]
    summary, cases = result["summary"], result["cases"]
    page, readme = (
        " ".join((ROOT / one).read_text("utf-8").split()) for one in ("docs/published-peaks.md", "README.md")
    )
    assert summary["right_verdicts"] == summary["comparable"]
    met = f"{summary['within_0.2_pct']} of {summary['peaks']}"
    assert met in readme
    assert f"{met} of litgpt's on A10G within 0.2%, the other within {summary['worst_error_pct']:.1f}%" in PAGE
    assert f"{summary['right_verdicts']} of {summary['comparable']} configs" in PAGE
    for figures in (
        f"Of {summary['peaks']} published peaks, {summary['within_0.2_pct']} are met",
        f"The worst is {summary['worst_error_pct']:.1f}% off",
        f"in {summary['out_of_memory']} of these {summary['comparable']}",
        f"{summary['configs']} configs were run",
    ):
        assert figures in page, figures
    rows = (ROOT / "docs" / "published-peaks.md").read_text("utf-8").splitlines()
    for name, one in cases.items():
        published, ours = (
            "out of memory" if size is None else f"{size:.2f}"
            for size in (one["published_gb"], None if one["status"] == 3 else one["peak_allocated"] / 1e9)
        )
        apart = "" if one["error_pct"] is None else f"{one['error_pct']:+.2f}%"
        apart = "not comparable" if one["is_less_than_weights_and_adamw"] else apart
        cells = (name.removesuffix(".yaml"), one["devices"], one["micro_batch_size"], published, ours)
        assert f"| {' | '.join(map(str, cells))} | {apart} |" in rows


def test_the_table_of_growth_is_that_of_the_results():
    assert "None is above 1." in GROWTH
    for name, one in RESULTS["growth"]["cases"].items():
        assert one["exponent"] <= 1
        sizes, costs = (", ".join(f"{value:g}" for value in values) for values in (one["sizes"], one["processor_ms"]))
        assert f"| {name} | {one['size']}: {sizes} | {costs} | {one['exponent']} |" in GROWTH


def test_the_row_of_faults_counts_equal_ends_and_says_the_latest():
    faults = RESULTS["faults"]["faults"]

    def equal(kind: str) -> int:
        return sum(seen[kind]["exit"] == seen["without"]["exit"] for seen in faults.values())

    def latest_s(kind: str) -> float:
        return float(max(max(seen[kind]["seconds"]) - max(seen["without"]["seconds"]) for seen in faults.values()))

    assert (
        f"{equal('with')} of {len(faults)} faults with the default callbacks, the latest {latest_s('with'):.0f} s"
        in PAGE
    )
    assert f"{equal('every')} of {len(faults)}, the latest {latest_s('every'):.0f} s later" in PAGE


def test_the_page_of_oom_recovery_says_its_figures():
    result, page = RESULTS["oom_recovery"], " ".join((ROOT / "docs" / "oom-recovery.md").read_text("utf-8").split())
    own = result["own_us_per_step"]
    names = ("with", "with a callback without hooks", "without")
    steps = [f"{result['trainer_step_us'][name]['median']:.0f}" for name in names]
    plain, accumulated = own["100 parameters"], own["100 parameters, accumulated gradients"]
    assert max(plain, accumulated, own["1000 parameters"]) < result["goal_us"]
    for sentence in (
        f"takes {plain:.0f} microseconds on the host with 100 parameters and {own['1000 parameters']:.0f} with 1000",
        f"50 small ones take {own['100 parameters, 50 constant buffers']:.0f} microseconds in all",
        f"{accumulated:.0f} microseconds with 100 parameters, and {(accumulated - plain) / 100:.2f} more for each",
        f"took {steps[0]} microseconds with it, {steps[1]} with a callback without hooks and {steps[2]} without any",
        f"BatchNorms with `allow_batch_norm=True` {own['200 parameters, 50 BatchNorms, allowed']:.0f}.",
    ):
        assert sentence in page, sentence


def test_the_costs_of_whole_steps_are_those_of_the_results():
    page, steps = (ROOT / "docs" / "halt-on-nan-held-back.md").read_text("utf-8"), RESULTS["step_cost"]["steps"]
    for case in steps["1 ms"].keys() - {"bare_step_ms"}:
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {case} |"))
        shown = [float(cell) for cell in row.split("|")[2:-1]]
        assert shown == pytest.approx([step[case]["median"] for step in steps.values()], abs=0.0051), case


def test_the_costs_on_the_page_of_halt_on_nan_are_those_of_the_results():
    page, costs = (ROOT / "docs" / "halt-on-nan.md").read_text("utf-8"), RESULTS["halt_on_nan"]
    for check in costs["AdamW"]["4x64"].keys() - {"parameters", "tensors", "bare_step_ms"}:
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {check} |"))
        figure = "whole_step_cpu" if check == "detect_anomaly" else "inside_its_hooks_cpu"
        measured = [
            100 * costs[optimizer][shape][check][figure]["median"]
            for optimizer in ("AdamW", "AdamW(fused=True)")
            for shape in ("4x64", "1x16")
        ]
        shown = [float(cell.strip(" %")) for cell in row.split("|")[2:-1]]
        assert shown == pytest.approx(measured, rel=0.05), check
