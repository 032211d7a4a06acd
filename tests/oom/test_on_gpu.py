"""The same failures on a real device, held to 2 GiB by the process's memory fraction."""

from __future__ import annotations

import gc
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz as viz

from lightning_memtools import OOMReport
from lightning_memtools.memory.history_recording import record
from lightning_memtools.oom.failure_capture import FailureCapture, observe
from lightning_memtools.oom.failure_facts import FailureMoment
from tests.lightning_models import trainer
from tests.oom_models import Layers, place_of, sizes_in

pytestmark = pytest.mark.cuda_memory

GIB = 2**30
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "forward": ("fit", {"batch": 370}, "batch"),
    "backward": ("fit", {"batch": 300}, "batch"),
    "validation": ("val", {"n": 4, "wide": 2, "batch": 120, "val_batch": 620}, "val_batch"),
    "predict": ("predict", {"n": 4, "wide": 2, "val_batch": 620}, "val_batch"),
    "optimizer": ("fit", {"n": 1, "wide": None, "batch": 4, "width": 11_000}, "batch"),
}


@pytest.fixture(autouse=True)
def two_gibibytes():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2 * GIB / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def attempt(root: Path, call: str, **sizes: Any) -> str | None:
    """The report of a run that fails; None of one that fits."""
    gc.collect()
    torch.cuda.empty_cache()
    run = trainer(
        root, OOMReport(directory=str(root)), accelerator="gpu", devices=1, logger=False, num_sanity_val_steps=0,
        limit_val_batches=1.0 if call == "val" else 0,
    )  # fmt: skip
    try:
        getattr(run, {"val": "fit"}.get(call, call))(Layers(**sizes))
    except torch.OutOfMemoryError as error:
        return place_of(error).read_text()
    return None


@pytest.mark.parametrize("name", CASES)
def test_the_split_adds_up_and_the_suggested_batch_size_fits_and_the_next_does_not(name, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_memtools.oom.oom_reporter.CHECKS_S", 600.0)  # on a busy machine, too
    call, sizes, key = CASES[name]
    before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    seen: list[tuple[int, int]] = []
    stop = observe(
        torch.device("cuda", 0),
        lambda *_: seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"])),
    )
    try:
        report = attempt(tmp_path, call, **sizes)
    finally:
        stop()
    assert report is not None
    allocated, n_allocations = seen[-1]
    assert n_allocations > before
    # Nothing was allocated between the failure and here: not by capturing, tracing, or writing.
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == n_allocations
    split = sizes_in(report, "What filled the device")
    assert split.pop("allocated") == pytest.approx(allocated, rel=0.01)
    assert sum(split.values()) == pytest.approx(allocated, rel=0.01)
    if name == "optimizer":
        weights = 4 * 11_000 * 11_001
        assert split["parameters"] == pytest.approx(weights, rel=0.01)
        assert split["gradients"] == pytest.approx(weights, rel=0.01)
        return
    wide = sizes.get("wide", 4)
    assert next(iter(sizes_in(report, "Modules with the most activations"))) == f"net.{wide}.0"
    found = re.search(rf"batches of (\d+) instead of {sizes[key]}", report)
    size = int(found[1])
    assert attempt(tmp_path, call, **(sizes | {key: size})) is None
    assert attempt(tmp_path, call, **(sizes | {key: size + 1})) is not None


def test_the_snapshot_opens_and_has_python_stacks(tmp_path):
    call, sizes, _ = CASES["forward"]
    assert attempt(tmp_path, call, **sizes) is not None
    snapshot = pickle.loads(next(tmp_path.glob("*-snapshot.pickle")).read_bytes())  # noqa: S301, written above
    viz.segsum(snapshot)
    assert "OutOfMemoryError" in viz.trace(snapshot)
    frames = {frame["filename"] for entry in snapshot["device_traces"][0] for frame in entry.get("frames", [])}
    assert any(name.endswith("oom_models.py") for name in frames)
    assert not any(name.endswith(".cpp") for name in frames)
    assert not torch._C._cuda_isHistoryEnabled()


def test_stacks_are_recorded_where_memory_may_run_out():
    model, device = torch.nn.Linear(2, 2).cuda(), torch.device("cuda", 0)
    capture = FailureCapture(device, model, lambda: FailureMoment("train"), list, snapshot=True)
    held = []

    def has_stack(samples: int) -> bool:
        capture.begin_batch("train", torch.empty(samples, device="cuda"), 0, "forward")
        held.append(torch.empty(2**20, device="cuda"))
        capture.end_batch()
        last = [entry for entry in capture.recording.take()["device_traces"][0] if entry["action"] == "alloc"][-1]
        assert last["size"] == 4 * 2**20
        return bool(last.get("frames"))

    try:
        assert all(has_stack(1000) for _ in range(20))
        assert not any(has_stack(1000) for _ in range(5))
        other = record(capture.reader)  # such as that of MemoryMonitor(snapshot_at_step=...)
        assert has_stack(2000)
        other.stop()
        assert not has_stack(2000)
        held.append(torch.empty(GIB, dtype=torch.uint8, device="cuda"))  # more than half of the two that there are
        assert has_stack(2000)
    finally:
        capture.stop()
    assert not torch._C._cuda_isHistoryEnabled()
