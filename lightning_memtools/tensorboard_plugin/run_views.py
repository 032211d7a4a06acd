"""The figures and curves of a run as JSON values. Curves are thinned so that every peak stays."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_memtools.tensorboard_plugin.event_files import Curve, LoggedRun, LoggedText
from lightning_memtools.tensorboard_plugin.report_text import report_as_html

STAGES = ("train", "val", "test", "predict")
# Up to twice as many logged steps are sent as they are, so that zooming in shows each of them.
BUCKETS = 10_000

# A figure that never changes needs no curve, and the counts are shown as marks.
_COUNTS = {
    "memory/alloc_retries": ("retry", "allocation retry", "allocation retries"),
    "memory/ooms": ("oom", "out-of-memory error", "out-of-memory errors"),
    "memory/oom_recoveries": ("oom", "recovery from running out of memory", "recoveries from running out of memory"),
    "spikes/found": ("spike", "loss spike", "loss spikes"),
    "nonfinite/skipped": ("nonfinite", "step skipped because of NaN or Inf", "steps skipped because of NaN or Inf"),
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
    groups = [_group(family, curves) for family, curves in _curves_that_belong_together(run)]
    n_all = sum(group["n_points"] for group in groups)
    n_shown = sum(len(group["steps"]) for group in groups)
    return {
        "run": run.name,
        "groups": [group for group in groups if group["steps"]],
        "merged": {"points": n_all, "shown": n_shown} if n_shown < n_all else None,
        "marks": marks_of(run),
        "evaluations": evaluations_of(run),
        "summary": summary_of(run),
        "notes": list(run.notes),
        "reports": [_said(text) for text in _by_importance(run)],
    }


def _curves_that_belong_together(run: LoggedRun) -> Iterator[tuple[str, dict[str, Curve]]]:
    """Yield (common prefix of the tags, curves by tag) for each group of related curves with the same steps."""
    groups: dict[tuple[str, bytes], dict[str, Curve]] = defaultdict(dict)
    for tag, curve in sorted(run.curves.items()):
        if "/batch_" not in tag:  # those count batches, not training steps
            groups[_family(tag), curve.steps.tobytes()][tag] = curve
    for (family, _), curves in groups.items():
        yield family, curves


def _family(tag: str) -> str:
    parts = tag.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 or parts[0] in {"loss", "grad"} else parts[0]  # noqa: PLR2004


def _group(family: str, curves: Mapping[str, Curve]) -> dict[str, Any]:
    some = next(iter(curves.values()))
    n_points = len(some.steps)
    kept: Sequence[int] = range(n_points) if n_points <= 2 * BUCKETS else _kept(curves, n_points)
    return {
        "family": family,
        "steps": [some.steps[at] for at in kept],
        "times": [round(some.times[at], 3) for at in kept],
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
    ms_at = dict(zip(took.steps, took.values, strict=True))
    for step, gib in zip(freed.steps, freed.values, strict=True):
        if gib > 0:
            marks.append({"step": step, "kind": "cache", "gib": _json(gib), "ms": _json(ms_at.get(step, math.nan))})
    leaks = run.curves.get("memory/leaks", Curve())
    for step, count in zip(leaks.steps, leaks.values, strict=True):  # of one warning, not since the beginning
        words = "leak was found" if count == 1 else "leaks were found"
        marks.append({"step": step, "kind": "leak", "count": int(count), "words": words})
    if "nonfinite/skipped" not in run.curves:  # the step that ended a run has no point
        bad = [text.step for text in run.texts if text.tag == "memtools/nonfinite_report"]
        marks += [{"step": step, "kind": "nonfinite", "count": 1, "words": "step was NaN or Inf"} for step in bad]
    for tag, (kind, one, several) in _COUNTS.items():
        before = 0.0
        curve = run.curves.get(tag, Curve())
        for step, count in zip(curve.steps, curve.values, strict=True):
            if count > before:
                n = int(count - before)
                marks.append({"step": step, "kind": kind, "count": n, "words": one if n == 1 else several})
            before = count
    for tag, curve in run.curves.items():
        if tag.startswith("loss/") and not math.isfinite(sum(curve.values)):  # faster than a loop
            bad = [step for step, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)]
            marks.extend(
                {"step": step, "kind": "nonfinite", "count": 1, "words": f"value of {tag} is no number"} for step in bad
            )
    return sorted(marks, key=lambda mark: mark["step"])[-_MAX_MARKS:]


def evaluations_of(run: LoggedRun) -> list[dict[str, Any]]:
    """Return the stage, training step and end time of each validation or test in a run, sorted by step."""
    found: list[dict[str, Any]] = []
    for stage in STAGES[1:]:
        curve = _first_curve(run, f"memory/{stage}/peak_allocated_gib", f"memory/{stage}/allocated_gib")
        if curve is None and stage == "val":
            curve = next((curve for tag, curve in sorted(run.curves.items()) if tag.startswith("loss/val")), None)
        if curve is not None:
            found += [
                {"stage": stage, "step": step, "end": end} for step, end in zip(curve.steps, curve.times, strict=True)
            ]
    return sorted(found, key=lambda evaluation: (evaluation["step"], evaluation["end"]))[-5 * _MAX_MARKS :]


def _first_curve(run: LoggedRun, *tags: str) -> Curve | None:
    return next((run.curves[tag] for tag in tags if tag in run.curves), None)


def summary_of(run: LoggedRun) -> dict[str, Any]:
    """Return the main numbers of a run: peaks of each stage, capacity, time per step, losses and counts."""
    stages: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        for name in ("peak_allocated", "peak_reserved"):
            curve = _first_curve(run, f"memory/{stage}/{name}_gib")
            if curve is not None:
                stages.setdefault(stage, {})[name] = _highest(curve)
    capacity = _first_curve(run, "memory/capacity_gib")
    return {
        "run": run.name,
        "stages": stages,
        "capacity_gib": _last(capacity),
        "host_gib": _highest_value(_first_curve(run, "memory/host_rss_gib")),
        "host_used_gib": _highest_value(_first_curve(run, "memory/host/used_gib")),
        "host_limit_gib": _last(_first_curve(run, "memory/host/limit_gib")),
        "step_ms": _median(_first_curve(run, "time/step_ms")),
        "loss_train": _last(next(iter(_with_prefix(run, "loss/train")), None)),
        "loss_val": _last(next(iter(_with_prefix(run, "loss/val")), None)),
        "retries": _highest_value(_first_curve(run, "memory/alloc_retries")),
        "ooms": _highest_value(_first_curve(run, "memory/ooms")),
        "last_step": max((curve.steps[-1] for tag, curve in run.curves.items() if "/batch_" not in tag), default=None),
        "recoveries": _highest_value(_first_curve(run, "memory/oom_recoveries")),
        "batch_size": _headline(run, "memtools/batch_size"),
        "checkpoint_plan": _headline(run, "memtools/checkpoint_plan"),
    }


def runs_view(runs: Mapping[str, LoggedRun]) -> dict[str, Any]:
    """Return the summaries of the runs, sorted by name, and the name of the run to show first.

    The run to show first is the newest that has curves, because a run that failed at once may have only reports.
    """
    first = max(runs.values(), key=lambda run: (bool(run.curves), _end(run)), default=None)
    shown = {"runs": [summary_of(run) for run in sorted(runs.values(), key=_natural_name)]}
    return shown | ({"newest": first.name} if first else {})


def _end(run: LoggedRun) -> float:
    return max([*(curve.times[-1] for curve in run.curves.values()), *(text.time for text in run.texts)])


def _natural_name(run: LoggedRun) -> list[tuple[str, int]]:
    """Return a key that sorts runs by name, with version_10 after version_9."""
    return [(words, int(digits or 0)) for words, digits in re.findall(r"(\D*)(\d*)", run.name)]


def _with_prefix(run: LoggedRun, prefix: str) -> Iterable[Curve]:
    return (curve for tag, curve in sorted(run.curves.items()) if tag.startswith(prefix))


def _highest(curve: Curve) -> dict[str, Any]:
    at = max(range(len(curve.values)), key=curve.values.__getitem__)
    return {"gib": _json(curve.values[at]), "step": curve.steps[at]}


def _highest_value(curve: Curve | None) -> float | None:
    return None if curve is None else _json(max(curve.values))


def _last(curve: Curve | None) -> float | None:
    return None if curve is None else _json(curve.values[-1])


def _median(curve: Curve | None) -> float | None:
    if curve is None:
        return None
    # The first point of a run contains what happens once: compilation, the choice of convolution algorithms.
    values = curve.values[1:] or curve.values
    return _json(statistics.median(values))


def _headline(run: LoggedRun, tag: str) -> str | None:
    """Return the first sentence of the latest report with the tag `tag`; None if the run has no such report."""
    return next((_first_sentence(text.text) for text in reversed(run.texts) if text.tag == tag), None)


def _first_sentence(text: str) -> str:
    """Return a report's first line that is neither a heading nor a table row."""
    lines = [line for line in text.splitlines() if line.strip("#* ")]
    lines.sort(key=lambda line: line.startswith(("#", "|")))
    return lines[0].strip("#*- ") if lines else ""


def _by_importance(run: LoggedRun) -> list[LoggedText]:
    """Return the reports by kind, the most serious kind first. Within a kind, the newest come first."""
    newest_first = sorted(run.texts, key=lambda text: text.time, reverse=True)
    return sorted(newest_first, key=_rank)


def _rank(text: LoggedText) -> int:
    kind = text.tag.removeprefix("memtools/")
    if kind not in _GRAVEST_FIRST or _FOUND_NOTHING in text.text:
        return len(_GRAVEST_FIRST) + (_FOUND_NOTHING in text.text)
    return _GRAVEST_FIRST.index(kind)


def _said(text: LoggedText) -> dict[str, Any]:
    """Return a report's tag, its step, and one line that sums it up: its title if informative, else a sentence."""
    first = text.text.strip().partition("\n")[0]
    words = first.strip("# ") if first.startswith("# ") and ":" in first else _first_sentence(text.text)
    if text.tag == "memtools/ended":  # torch's message on memory is a paragraph
        words = re.split(r"(?<=\.)\s", words)[0]
    return {"tag": text.tag, "step": text.step, "words": words, "found_nothing": _FOUND_NOTHING in text.text}


def reports_of(run: LoggedRun) -> list[dict[str, Any]]:
    """Return the reports of a run as HTML, each with its tag, step and time, most important first."""
    return [{**_said(text), "time": text.time, "html": report_as_html(text.text)} for text in _by_importance(run)]
