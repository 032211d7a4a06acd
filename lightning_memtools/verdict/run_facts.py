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
    """One rank's measurements of a fit, as JSON values.

    Attributes:
        rank: The rank, counted from 0.
        steps: The number of training batches that were measured, which are all but the first.
        host_s: The seconds that each phase took on the host.
        device_s: The seconds that each phase took on the GPU; None without a GPU.
        behind_share: The fraction of steps in which the host queued all of backward before the GPU began the step.
        peak_bytes: The highest peak of allocated bytes in any stage; None if the device does not record peaks.
        reserved_bytes: The highest peak of reserved bytes in any stage; None if the device does not record peaks.
        capacity_bytes: The memory of the device in bytes; None if unknown.
        composition_bytes: The bytes by category at the peak of training; None if unknown.
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
        """The seconds of each phase, on the GPU if there is one, otherwise on the host."""
        return self.device_s or self.host_s

    @property
    def training_s(self) -> float:
        """The seconds that training took, without validation."""
        return sum(seconds for phase, seconds in self.phases_s.items() if phase != "validation")

    @property
    def step_ms(self) -> float | None:
        """The milliseconds per training step, including the wait for data; None if no step was measured."""
        return 1000 * self.training_s / self.steps if self.steps else None

    def share(self, phase: str) -> float:
        """Return the fraction of training time that a phase took; for "validation", the fraction of the whole fit."""
        seconds = self.phases_s.get(phase, 0.0)
        whole = self.training_s + (seconds if phase == "validation" else 0.0)
        return seconds / whole if whole else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All measurements of a fit.

    Attributes:
        ranks: The measurements of each rank that sent them in time, rank 0 first.
        device: The device's name.
        error: The error that ended the run, in one line; "" for none.
        num_workers: The number of workers of the training loader; None if the loader is not a DataLoader.
        skipped_steps: The number of steps that HaltOnNaN has skipped.
        loss_spikes: The number of spikes that LossSpikes has found.
        leaks: The number of leaks that EmptyCache or the doctor has found.
        checks: The number of checks that the doctor ran.
        findings: The doctor's serious findings.
        waits: The lines of training_step that wait for the GPU.
        remarks: Other remarks of callbacks on the run.
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
        """The rank with the highest peak."""
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
        path: The path of the file, or of a folder that has it directly or in `memtools/`.

    Raises:
        ValueError: There is no such file, or its schema is not supported.
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
