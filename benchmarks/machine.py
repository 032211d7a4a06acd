"""What the measurements were made with, and how they are written down."""

from __future__ import annotations

import datetime as dt
import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch

RESULTS = Path(__file__).parent / "results"
_LINE = 150


def description() -> dict[str, Any]:
    """Return the machine, without names of hosts or paths."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Lightning {lightning.__version__}"
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"processor": platform.machine(), "threads": torch.get_num_threads(), "versions": versions, **gpu}


def spread(samples: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return the median, and the quarter and three-quarter points, of repeated runs."""
    low, middle, high = (round(point, digits) for point in statistics.quantiles(samples, n=4))
    return {"median": middle, "quarter": low, "three_quarters": high, "runs": len(samples)}


def interleaved(cases: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure each case `repeats` times, in turn, so that a slow moment of the machine hits all of them."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, measure in cases.items():
            samples[name].append(measure())
    return samples


def known(name: str) -> dict[str, Any]:
    """Return the committed summary of this name, empty where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(name: str, summary: Mapping[str, Any], *, section: str | None = None) -> None:
    """Print a summary with the date and the machine, and write it to results/<name>.json.

    With a section, it is written beside the other sections of the file.
    """
    stamped = {"measured": dt.datetime.now(dt.UTC).date().isoformat(), "machine": description(), **summary}
    write(name, stamped if section is None else known(name) | {section: stamped})


def write(name: str, summary: Mapping[str, Any]) -> None:
    """Print a summary, and write it to results/<name>.json as it is."""
    text = in_lines(summary)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def in_lines(value: Any, indent: int = 0, key: str = "") -> str:
    """Return JSON in which a value that fits into a line has one."""
    flat = key + json.dumps(value)
    if indent + len(flat) <= _LINE or not isinstance(value, (dict, list)):
        return flat
    if isinstance(value, dict):
        rows = [in_lines(one, indent + 2, f"{json.dumps(name)}: ") for name, one in value.items()]
    else:
        rows = [in_lines(one, indent + 2) for one in value]
    start, end = "{}" if isinstance(value, dict) else "[]"
    inner = " " * (indent + 2)
    return f"{key}{start}\n" + ",\n".join(inner + row for row in rows) + f"\n{' ' * indent}{end}"
