"""The main job, as a user does it: run the example, start TensorBoard, look at its pages in a browser."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.browser import get, tensorboard
from tests.integration.shown_outputs import not_printed
from tests.prepared.starting import prepared_python

ROOT = Path(__file__).parents[2]
RUN = "lightning_logs/version_0"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What the example printed, and where it logged."""
    logs = tmp_path_factory.mktemp("demo") / "logs"
    command = [prepared_python(), str(ROOT / "examples" / "digits.py"), "--logs", str(logs)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=ROOT)
    return result.stdout, logs


@pytest.fixture(scope="module")
def board(demo, tmp_path_factory):
    """The address of a TensorBoard server over the example's logs."""
    with tensorboard(demo[1], tmp_path_factory.mktemp("server") / "output") as address:
        yield address


def test_the_example_reaches_95_percent_and_says_where_to_look(demo):
    printed, logs = demo
    (accuracy,) = (line.split()[-1] for line in printed.splitlines() if line.startswith("Accuracy on"))
    assert float(accuracy.rstrip("%")) >= 95
    assert f"tensorboard --logdir {logs}" in printed
    assert printed.count("Memory peaks on") == 2  # one block for fit, one for test
    assert "simulated" in printed
    assert not_printed("digits.py", printed) == []


def test_the_server_offers_every_tag_of_the_design(board):
    tags = set(get(board, "plugin/scalars/tags")[RUN])
    expected = {"loss/train", "loss/val", "memory/capacity_gib", "memory/device_used_gib", "memory/host_rss_gib",
                "memory/alloc_retries", "memory/ooms", "time/step_ms"}  # fmt: skip
    for stage in ("train", "val", "test"):
        expected |= {f"memory/{stage}/{figure}" for figure in (
            "allocated_gib", "reserved_gib", "peak_allocated_gib", "peak_reserved_gib", "peak_used_pct",
            "fragmentation_pct")}  # fmt: skip
    categories = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")
    expected |= {f"memory/composition/{category}_gib" for category in categories}
    assert expected <= tags
    losses = get(board, "plugin/scalars/scalars", run=RUN, tag="loss/train")
    assert losses[-1][2] < losses[0][2] / 4  # it learned


def test_the_server_offers_the_summaries_as_tables(board):
    tag = "memtools/memory_summary/text_summary"
    assert set(get(board, "plugin/text/tags")[RUN]) - {"memtools/doctor/text_summary"} == {tag}
    entries = get(board, "plugin/text/text", run=RUN, tag=tag)
    assert "<table>" in entries[0]["text"]
    assert "simulated" in entries[0]["text"]
    assert len(entries) == 2
