"""The views of a run: thinned without losing a peak, marks, figures."""

from __future__ import annotations

import json
import math
import re

import pytest

from lightning_memtools.tensorboard_plugin.event_files import Curve, LoggedRun, LoggedText
from lightning_memtools.tensorboard_plugin.run_views import (
    evaluations_of,
    marks_of,
    reports_of,
    run_view,
    runs_view,
    summary_of,
)


def run_with(**curves):
    run = LoggedRun("run")
    for tag, points in curves.items():
        curve = run.curves.setdefault(tag, Curve())
        for step, value in points:
            curve.add(step, 100.0 + step, value)
    return run


def series(view, tag):
    (group,) = (group for group in view["groups"] if tag in group["series"])
    return dict(zip(group["steps"], group["series"][tag], strict=True))


def test_a_nan_loss_survives_thinning():
    run = run_with(**{"loss/train": [(s, math.nan if s == 4321 else 1.0 + s % 3) for s in range(30_000)]})
    view = run_view(run)
    assert len(view["groups"][0]["steps"]) < view["groups"][0]["n_points"] == 30_000
    assert series(view, "loss/train")[4321] is None


def test_20000_steps_are_sent_as_they_are_each_as_a_whole_point():
    tags = ("memory/train/allocated_gib", "memory/train/peak_allocated_gib")
    curves = {tag: {s: (s * (i + 3)) % 101 / 101 for s in range(20_000)} for i, tag in enumerate(tags)}
    view = run_view(run_with(**{tag: curve.items() for tag, curve in curves.items()}))
    assert {tag: series(view, tag) for tag in tags} == {tag: pytest.approx(curve) for tag, curve in curves.items()}


def test_nan_and_infinity_can_be_sent_and_are_marked():
    run = run_with(**{"loss/train": [(0, 1.0), (1, math.nan), (2, math.inf)]})
    view = json.loads(json.dumps(run_view(run), allow_nan=False))
    assert series(view, "loss/train") == {0: 1.0, 1: None, 2: None}
    assert [(mark["step"], mark["kind"]) for mark in view["marks"]] == [(1, "nonfinite"), (2, "nonfinite")]


def test_marks_say_what_happened():
    run = run_with(**{
        "memory/cache/freed_gib": [(10, 1.5), (20, 0.0)],
        "memory/cache/ms": [(10, 3.0), (20, 1.0)],
        "memory/alloc_retries": [(0, 0.0), (5, 2.0), (6, 2.0), (7, 3.0)],
        "memory/ooms": [(0, 0.0), (9, 1.0)],
        "memory/leaks": [(8, 1.0), (11, 1.0)],  # of each warning, not since the beginning
    })  # fmt: skip
    found = [(mark["step"], mark["kind"], mark.get("count"), mark.get("gib")) for mark in marks_of(run)]
    assert found == [
        (5, "retry", 2, None), (7, "retry", 1, None), (8, "leak", 1, None), (9, "oom", 1, None),
        (10, "cache", None, 1.5), (11, "leak", 1, None),
    ]  # fmt: skip


def test_runs_come_in_the_order_of_their_numbers_and_the_newest_is_named():
    curves = {f"version_{n}": Curve() for n in (10, 9, 2)}
    for (_, curve), time in zip(curves.items(), (5.0, 9.0, 7.0), strict=True):
        curve.add(0, time, 1.0)
    runs = {name: LoggedRun(name, curves={"loss/train": curve}) for name, curve in curves.items()}
    view = runs_view(runs)
    assert [run["run"] for run in view["runs"]] == ["version_2", "version_9", "version_10"]
    assert view["newest"] == "version_9"
    runs["halted"] = LoggedRun("halted", texts=[LoggedText("memtools/nonfinite_report", 0, 99.0, "NaN")])
    assert runs_view(runs)["newest"] == "version_9", "the newest with curves"
    assert runs_view({"halted": runs["halted"]})["newest"] == "halted"


def test_evaluations_are_found_at_their_training_step():
    run = run_with(
        **{"memory/val/peak_allocated_gib": [(9, 1.0), (20, 1.0)], "memory/test/peak_allocated_gib": [(20, 1.0)]}
    )
    assert [(one["stage"], one["step"]) for one in evaluations_of(run)] == [("val", 9), ("val", 20), ("test", 20)]


def test_the_figures_of_a_run():
    run = run_with(**{
        "memory/train/peak_allocated_gib": [(0, 1.0), (1, 3.0), (2, 2.0)],
        "memory/capacity_gib": [(0, 8.0)],
        "time/step_ms": [(0, 900.0), (1, 10.0), (2, 12.0), (3, 11.0)],
        "loss/train": [(0, 2.0), (3, 0.5)],
    })  # fmt: skip
    said = "# Batch size\n\nBatch size: train 96, val 128 (in 9 trials, 2.0 s); test 7.\n\nmore"
    run.texts.append(LoggedText("memtools/batch_size", 0, 1.0, said))
    summary = summary_of(run)
    assert summary["stages"]["train"]["peak_allocated"] == {"gib": 3.0, "step": 1}
    assert (summary["capacity_gib"], summary["step_ms"], summary["loss_train"]) == (8.0, 11.0, 0.5)
    assert summary["batch_size"] == "Batch size: train 96, val 128 (in 9 trials, 2.0 s); test 7."
    assert summary["last_step"] == 3


def test_reports_are_html_that_runs_nothing():
    text = "# A title\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n\n<script>x</script> ![](http://x) [y](javascript:z)"
    (report,) = reports_of(LoggedRun("run", texts=[LoggedText("memtools/doctor", 3, 1.0, text)]))
    assert report["step"] == 3
    assert "<h4>A title</h4>" in report["html"]
    assert '<td style="text-align:right">2</td>' in report["html"]
    assert not re.search(r"<script|<img|href=.(?!http)", report["html"])


def test_what_ended_a_run_comes_first_then_findings_then_the_rest_and_what_found_nothing_last():
    kinds = ["doctor", "memory_summary", "leak", "oom_report", "memory_summary", "ended"]
    run = LoggedRun("run", texts=[LoggedText(f"memtools/{kind}", i, float(i), kind) for i, kind in enumerate(kinds)])
    run.texts.append(LoggedText("memtools/doctor", 9, 9.0, "# TrainingDoctor\n\n18 checks. Nothing was found."))
    found = [(report["tag"].removeprefix("memtools/"), report["step"]) for report in reports_of(run)]
    wanted = [("ended", 5), ("oom_report", 3), ("leak", 2), ("doctor", 0), ("memory_summary", 4), ("memory_summary", 1)]
    assert found == [*wanted, ("doctor", 9)]
    assert [(one["words"], one["found_nothing"]) for one in run_view(run)["reports"][-1:]] == [
        ("18 checks. Nothing was found.", True)
    ]


def test_a_run_that_ended_says_why_in_a_sentence_and_marks_the_step_that_was_nan():
    said = {
        "ended": "NonFiniteError: loss is nan at step 7. And more.",
        "nonfinite_report": "# Not finite: loss is nan",
    }
    run = LoggedRun("run", texts=[LoggedText(f"memtools/{kind}", 7, 1.0, text) for kind, text in said.items()])
    view = run_view(run)
    assert view["reports"][0]["words"] == "NonFiniteError: loss is nan at step 7."
    assert [(mark["step"], mark["kind"]) for mark in view["marks"]] == [(7, "nonfinite")]


def test_a_report_whose_title_says_what_happened_is_named_by_it():
    text = "# Out of memory on a device: tried 20 MiB.\n\n## What to do\n\n1. Less."
    run = LoggedRun("run", texts=[LoggedText("memtools/oom_report", 0, 1.0, text)])
    assert run_view(run)["reports"][0]["words"] == "Out of memory on a device: tried 20 MiB."
