"""The measurements of a training run, on which its verdict is based, and the file summary.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = 1
"""The version of summary.json. It rises when a key changes its meaning or goes; new keys may be added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """The measurements of a fit on one rank, as JSON values.

    Attributes:
        rank: The rank, counted from 0.
        steps: The number of training batches that were measured. The first batch of a fit is left out.
        host_s: The seconds that each phase, such as "forward", took on the host.
        device_s: The seconds that each phase took on the GPU; None without a GPU.
        behind_share: The fraction of steps that the GPU began only after the host had queued the whole backward pass.
        peak_bytes: The peak of allocated bytes in training and validation; None if the device does not record peaks.
        reserved_bytes: The peak of reserved bytes in training and validation; None if the device does not record peaks.
        capacity_bytes: The total memory of the device in bytes; None if unknown.
        composition_bytes: The bytes by category, such as activations, at the memory peak of training; None if unknown.
        batch_size: The largest number of samples in a training batch; None if unknown.
    """

    rank: int = 0
    steps: int = 0
    host_s: Mapping[str, float] = field(default_factory=dict)
    device_s: Mapping[str, float] | None = None
    behind_share: float = 0.0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    composition_bytes: Mapping[str, int] | None = None
    batch_size: int | None = None

    @property
    def phases_s(self) -> Mapping[str, float]:
        """The seconds that each phase took: on the GPU if there is one, otherwise on the host."""
        return self.device_s or self.host_s

    @property
    def training_s(self) -> float:
        """The seconds that training took, not counting validation."""
        return sum(seconds for phase, seconds in self.phases_s.items() if phase != "validation")

    @property
    def step_ms(self) -> float | None:
        """The milliseconds per training step, including the wait for data; None if no step was measured."""
        return 1000 * self.training_s / self.steps if self.steps else None

    def share(self, phase: str) -> float:
        """Return the fraction of training time that a phase took. For "validation", return its fraction of the fit."""
        seconds = self.phases_s.get(phase, 0.0)
        whole = self.training_s + (seconds if phase == "validation" else 0.0)
        return seconds / whole if whole else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that was measured and found in a fit.

    Attributes:
        ranks: The measurements of the ranks, rank 0 first; without ranks that did not send theirs in time.
        device: The device's name.
        error: The error that ended the run, in one line; "" for none.
        num_workers: `num_workers` of the training DataLoader; None if the loader has no such attribute.
        skipped_steps: The number of steps that HaltOnNaN has skipped.
        loss_spikes: The number of loss spikes that LossSpikes has found.
        leaks: The number of memory leaks that EmptyCache or TrainingDoctor has found.
        checks: The number of checks that TrainingDoctor ran.
        findings: The serious findings of TrainingDoctor.
        waits: The lines of code in training_step that wait for the GPU, such as "train.py:31".
        remarks: The remarks of other callbacks on memory in the run, one line each.
    """

    ranks: Sequence[RankFacts]
    device: str = "cpu"
    error: str = ""
    num_workers: int | None = None
    skipped_steps: int = 0
    loss_spikes: int = 0
    leaks: int = 0
    checks: int = 0
    findings: Sequence[str] = ()
    waits: Sequence[str] = ()
    remarks: Sequence[str] = ()

    @property
    def fullest(self) -> RankFacts:
        """The measurements of the rank whose memory peak is highest."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes or 0)


def summary_of(facts: RunFacts, verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of summary.json for a run; docs/run.md describes its keys."""
    content, first, fullest = asdict(facts), facts.ranks[0], facts.fullest
    ranks = content.pop("ranks")
    return {
        "schema": SCHEMA,
        "created": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "script": sys.argv,
        "verdict": dict(verdict),
        "run": content,
        "batch_size": first.batch_size,
        "time": {
            "clock": "host" if first.device_s is None else "device",
            "step_ms": first.step_ms,
            "shares": {phase: first.share(phase) for phase in first.phases_s},
        },
        "memory": {
            "rank": fullest.rank,
            "peak_allocated_bytes": fullest.peak_bytes,
            "peak_reserved_bytes": fullest.reserved_bytes,
            "capacity_bytes": fullest.capacity_bytes,
            "composition_bytes": fullest.composition_bytes,
        },
        "ranks": ranks,
    }


def read_summary(path: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json.

    Args:
        path: The path of the file, or of a folder that contains it, directly or in its subfolder `memtools/`.

    Raises:
        ValueError: There is no such file, or its format is not supported.
    """
    places = [path] if not path.is_dir() else [path / "summary.json", path / "memtools" / "summary.json"]
    place = next((each for each in places if each.is_file()), None)
    if place is None:
        raise ValueError(f"There is no {' and no '.join(map(str, places))}. `memtools run train.py` writes one.")
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{place} is no summary, since it cannot be read as JSON: {error}.") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA or not {"verdict", "time", "memory"} <= content.keys():
        raise ValueError(f"{place} is no summary of schema {SCHEMA} (schema: {schema}); `memtools run` writes them.")
    return content  # type: ignore[no-any-return]
