"""What the measurements were made with, and how they are written down."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch

RESULTS = Path(__file__).parent / "results"


def description() -> dict[str, Any]:
    """The machine, without names of hosts or paths."""
    found: dict[str, Any] = {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, and the quarter and three-quarter points of repeated runs."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return {"median": middle, "quarter": low, "three_quarters": high, "runs": len(samples)}


def interleaved(cases: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each case measured `repeats` times, in turn, so that a slow moment of the machine hits all of them."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, measure in cases.items():
            samples[name].append(measure())
    return samples


def save(name: str, measured: Mapping[str, Any]) -> None:
    """Print the figures and write them to results/<name>.json."""
    text = json.dumps({"machine": description(), **measured}, indent=2)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")
