"""A gallery of runs that fail: the report's first line names the cause, and its first advice makes the run fit."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_memtools import VirtualDevice
from tests.oom.gallery import EXHIBITS, MIB, Average, Exhibit, FitOn, Healthy, LargeNet


@contextmanager
def device_of(kind: str, mib: int) -> Iterator[None]:
    gc.collect()  # what an earlier run has left
    if kind == "cpu":
        with VirtualDevice(mib * MIB):
            yield
        return
    torch.cuda.empty_cache()
    # The process reserves no more than this.
    torch.cuda.set_per_process_memory_fraction(mib * MIB / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def report_of(exhibit: Exhibit, root: Path, kind: str) -> str:
    with device_of(kind, exhibit.capacity_mib):
        try:
            exhibit.run(FitOn(root, kind), mended=False)
        except RuntimeError:
            (page,) = root.glob("oom-*.md")
            return page.read_text()
    pytest.fail("the run fits")


def actions_of(report: str) -> list[str]:
    section = report.partition("## What to do\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. (.*)$", section, re.MULTILINE)


pytestmark = pytest.mark.filterwarnings("ignore:OOMRecovery. A batch")
KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda_memory)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXHIBITS)
def test_the_first_line_names_the_cause_and_the_first_advice_makes_the_run_fit(name, kind, tmp_path):
    exhibit = EXHIBITS[name]
    if not (exhibit.on_cuda if kind == "cuda" else exhibit.on_cpu):
        pytest.skip("shown on the other device")
    report = report_of(exhibit, tmp_path / "fails", kind)
    first = report.splitlines()[0]
    for words in exhibit.cause:
        assert words in first
    best = actions_of(report)[0]
    for words in exhibit.advice:
        assert words in best
    with device_of(kind, exhibit.capacity_mib):
        exhibit.run(FitOn(tmp_path / "fits", kind), mended=True)


def test_what_a_healthy_run_keeps_is_listed_and_is_not_called_the_cause(tmp_path):
    """A ring, a queue of momentum features and an average of the weights, in a run whose batch is too large."""
    with device_of("cpu", 32), pytest.raises(torch.OutOfMemoryError):
        FitOn(tmp_path, "cpu")(Healthy(), Average())
    (page,) = tmp_path.glob("oom-*.md")
    report = page.read_text()
    for path in ("Healthy.ring", "Average.copy"):
        assert path not in report.splitlines()[0]
        assert f"`{path}`" in report.partition("## Who holds the rest")[2].partition("\n## ")[0]
    assert "Healthy.queue" not in report  # a buffer belongs to the model
    assert "Delete" not in actions_of(report)[0]


def test_nobody_is_to_be_stopped_where_this_process_may_take_no_more(tmp_path):
    with (
        VirtualDevice(640 * MIB, used_by_others="300MiB", allocator="per_process_memory_fraction:0.05"),
        pytest.raises(RuntimeError),
    ):
        FitOn(tmp_path, "cpu")(LargeNet())
    (page,) = tmp_path.glob("oom-*.md")
    assert actions_of(page.read_text())
    assert "Stop others" not in page.read_text()
