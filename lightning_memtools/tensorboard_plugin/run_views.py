"""The figures and curves of a run as JSON values. Curves are thinned so that every peak stays."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_memtools.tensorboard_plugin.event_files import Curve, LoggedRun, LoggedText
from lightning_memtools.tensorboard_plugin.report_text import report_as_html

STAGES = ("train", "val", "test", "predict")
# Up to twice as many logged steps are sent as they are, so that zooming in shows each of them.
BUCKETS = 10_000

# Counts are shown as marks: (kind, words for one, words for several).
_COUNTS = {
    "memory/alloc_retries": ("retry", "allocation retry", "allocation retries"),
    "memory/ooms": ("oom", "out-of-memory error", "out-of-memory errors"),
    "memory/oom_recoveries": ("oom", "recovery from running out of memory", "recoveries from running out of memory"),
    "spikes/found": ("spike", "loss spike", "loss spikes"),
    "nonfinite/skipped": ("nonfinite", "step skipped because of NaN or Inf", "steps skipped because of NaN or Inf"),
    "memory/leaks": ("leak", "leak was found", "leaks were found"),
}
# Reports of these kinds come first, in this order; what found nothing and all other reports come last.
_GRAVEST_FIRST = ("ended", "nonfinite_report", "oom_report", "leak", "doctor", "loss_spike")
_FOUND_NOTHING = "Nothing was found."
_MAX_MARKS = 500
_DIGITS = 7


def run_view(run: LoggedRun) -> dict[str, Any]:
    """Return everything that the Memory tab shows for a run, as dicts, lists and numbers for JSON.

    Long curves are thinned. Their steps are divided into at most `BUCKETS` buckets. Each bucket keeps only the highest
    and lowest points of each curve, and those of the sum of related curves.
    """
    groups: dict[tuple[str, bytes], dict[str, Curve]] = defaultdict(dict)
    for tag, curve in sorted(run.curves.items()):  # those in one folder, with the same steps, are thinned together
        groups[tag.rpartition("/")[0], curve.steps.tobytes()][tag] = curve
    return {
        "run": run.name,
        "groups": [_group(curves) for curves in groups.values()],
        "marks": marks_of(run),
        "evaluations": evaluations_of(run),
        "summary": summary_of(run),
        "notes": list(run.notes),
        "reports": reports_of(run),
    }


def _group(curves: Mapping[str, Curve]) -> dict[str, Any]:
    some = next(iter(curves.values()))
    n_points = len(some.steps)
    kept: Sequence[int] = range(n_points) if n_points <= 2 * BUCKETS else _kept(curves, n_points)
    return {
        "steps": [some.steps[at] for at in kept],
        "series": {tag: [_json(curve.values[at]) for at in kept] for tag, curve in curves.items()},
        "n_points": n_points,
    }


def _kept(curves: Mapping[str, Curve], n_points: int) -> list[int]:
    """Return the indices of the points to show. In each range of steps, these are each curve's highest and lowest."""
    import numpy as np  # noqa: PLC0415, TensorBoard's start should not wait for it

    values = np.array([curve.values for curve in curves.values()])
    values[np.isnan(values)] = np.inf  # NaN must not be lost, and compares with nothing
    values = np.vstack([values, values.sum(0)])  # the parts of the memory belong together: their sum has a peak too
    values = values[values.max(1) > values.min(1)]
    steps = np.array(next(iter(curves.values())).steps)
    bucket = (steps - steps[0]) * BUCKETS // (steps[-1] - steps[0] + 1)
    kept = {0, n_points - 1}
    for begin, end in pairwise([*np.flatnonzero(np.diff(bucket, prepend=-1)).tolist(), n_points]):
        kept.update(begin + values[:, begin:end].argmax(1), begin + values[:, begin:end].argmin(1))
    return sorted(map(int, kept))


def _json(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def marks_of(run: LoggedRun) -> list[dict[str, Any]]:
    """Return the events to mark on charts: emptied caches, retries, out-of-memory errors, leaks, NaN and spikes."""
    marks: list[dict[str, Any]] = []
    freed, took = (run.curves.get(f"memory/cache/{name}", Curve()) for name in ("freed_gib", "ms"))
    for step, gib, ms in zip(freed.steps, freed.values, took.values, strict=False):  # both are logged at once
        if gib > 0:
            marks.append({"step": step, "kind": "cache", "gib": _json(gib), "ms": _json(ms)})
    for tag, (kind, one, several) in _COUNTS.items():
        before = 0.0
        curve = run.curves.get(tag, Curve())
        for step, count in zip(curve.steps, curve.values, strict=True):
            n = int(count - before)
            if n > 0:
                marks.append({"step": step, "kind": kind, "count": n, "words": one if n == 1 else several})
            if tag != "memory/leaks":  # it counts the leaks of one warning, not since the beginning
                before = count
    bad = [
        (step, f"value of {tag} is no number")
        for tag, curve in run.curves.items()
        if tag.startswith("loss/")
        for step, value in zip(curve.steps, curve.values, strict=True)
        if not math.isfinite(value)
    ]
    if "nonfinite/skipped" not in run.curves:  # the step that ended a run has no point
        bad += [(text.step, "step was NaN or Inf") for text in run.texts if text.tag == "memtools/nonfinite_report"]
    marks += [{"step": step, "kind": "nonfinite", "count": 1, "words": words} for step, words in bad]
    return sorted(marks, key=lambda mark: mark["step"])[-_MAX_MARKS:]


def evaluations_of(run: LoggedRun) -> list[dict[str, Any]]:
    """Return the stage and training step of each validation, test or prediction in a run, sorted by step."""
    found = dict.fromkeys(
        (stage, step)
        for stage in STAGES[1:]
        for tag, curve in run.curves.items()
        if tag.startswith((f"memory/{stage}/", f"loss/{stage}"))
        for step in curve.steps
    )
    return [{"stage": stage, "step": step} for stage, step in sorted(found, key=lambda one: one[1])][-5 * _MAX_MARKS :]


def summary_of(run: LoggedRun) -> dict[str, Any]:
    """Return the main numbers of a run: peaks of each stage, capacity, time per step, losses and counts."""
    stages: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        for name in ("peak_allocated", "peak_reserved"):
            curve = run.curves.get(f"memory/{stage}/{name}_gib")
            if curve is not None:
                stages.setdefault(stage, {})[name] = _highest(curve)
    return {
        "run": run.name,
        "stages": stages,
        "capacity_gib": _figure(run, "memory/capacity_gib", _last),
        "host_gib": _figure(run, "memory/host_rss_gib", max),
        "host_used_gib": _figure(run, "memory/host/used_gib", max),
        "host_limit_gib": _figure(run, "memory/host/limit_gib", _last),
        "step_ms": _figure(run, "time/step_ms", _median),
        "loss_train": _figure(run, "loss/train", _last),
        "loss_val": _figure(run, "loss/val", _last),
        "retries": _figure(run, "memory/alloc_retries", max),
        "ooms": _figure(run, "memory/ooms", max),
        "last_step": max((curve.steps[-1] for curve in run.curves.values()), default=None),
        "recoveries": _figure(run, "memory/oom_recoveries", max),
        "batch_size": _headline(run, "memtools/batch_size"),
        "checkpoint_plan": _headline(run, "memtools/checkpoint_plan"),
    }


def runs_view(runs: Mapping[str, LoggedRun]) -> dict[str, Any]:
    """Return the summaries of the runs, sorted by name, and the name of the run to show first.

    The run to show first is the newest that has curves, because a run that failed at once may have only reports.
    """
    first = max(runs.values(), key=lambda run: (bool(run.curves), _end(run)), default=None)
    return {
        "runs": [summary_of(run) for run in sorted(runs.values(), key=_natural_name)],
        "newest": first and first.name,
    }


def _end(run: LoggedRun) -> float:
    return max([*(curve.times[-1] for curve in run.curves.values()), *(text.time for text in run.texts)])


def _natural_name(run: LoggedRun) -> list[tuple[str, int]]:
    """Return a key that sorts runs by name, with version_10 after version_9."""
    return [(words, int(digits or 0)) for words, digits in re.findall(r"(\D*)(\d*)", run.name)]


def _highest(curve: Curve) -> dict[str, Any]:
    at = max(range(len(curve.values)), key=curve.values.__getitem__)
    return {"gib": _json(curve.values[at]), "step": curve.steps[at]}


def _figure(run: LoggedRun, prefix: str, of: Callable[[Sequence[float]], float]) -> float | None:
    """Return a figure of the first curve whose tag begins with `prefix`; None if the run has no such curve."""
    tag = min((tag for tag in run.curves if tag.startswith(prefix)), default=None)
    return None if tag is None else _json(of(run.curves[tag].values))


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _median(values: Sequence[float]) -> float:
    # The first point of a run contains what happens once: compilation, the choice of convolution algorithms.
    return statistics.median(values[1:] or values)


def _headline(run: LoggedRun, tag: str) -> str | None:
    """Return what the latest report with the tag `tag` says in a line; None if the run has no such report."""
    return next((_words_of(text) for text in reversed(run.texts) if text.tag == tag), None)


def _words_of(text: LoggedText) -> str:
    """Return the line that sums up a report: its title if that has a colon, else the first line of its text."""
    lines = [line for line in text.text.splitlines() if line.strip("#* ")] or [""]
    if not (lines[0].startswith("# ") and ":" in lines[0]):
        lines.sort(key=lambda line: line.startswith(("#", "|")))
    words = lines[0].strip("#*- ")
    # torch's message on memory is a paragraph.
    return re.split(r"(?<=\.)\s", words)[0] if text.tag == "memtools/ended" else words


def _rank(text: LoggedText) -> tuple[bool, int, float]:
    kind = text.tag.removeprefix("memtools/")
    return _FOUND_NOTHING in text.text, (*_GRAVEST_FIRST, kind).index(kind), -text.time


def reports_of(run: LoggedRun) -> list[dict[str, Any]]:
    """Return a run's reports by kind, the most serious kind first. Within a kind, the newest come first."""
    return [
        {
            "tag": text.tag,
            "step": text.step,
            "time": text.time,
            "words": _words_of(text),
            "found_nothing": _FOUND_NOTHING in text.text,
            "html": report_as_html(text.text),
        }
        for text in sorted(run.texts, key=_rank)
    ]
