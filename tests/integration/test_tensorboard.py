"""The main job, as a user does it: run the example, start TensorBoard, look at its pages in a browser."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.browser import chromium, count_curves, get, seen, tensorboard, wait_until
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


def test_the_server_offers_one_layout_with_losses_and_memory_on_shared_charts(board):
    layout = get(board, "plugin/custom_scalars/layout")
    charts = {
        category["title"]: {chart["title"]: chart["multiline"]["tag"] for chart in category["chart"]}
        for category in layout["category"]
    }
    assert set(charts) == {"memory", "loss"}
    query = {"run": RUN, "tag": charts["loss"]["training and validation"][0]}
    assert set(get(board, "plugin/custom_scalars/scalars", **query)["tag_to_events"]) == {"loss/train"}
    (memory,) = charts["memory"]["train: allocated and reserved (GiB)"]
    drawn = get(board, "plugin/custom_scalars/scalars", run=RUN, tag=memory)["tag_to_events"]
    assert set(drawn) == {
        f"memory/train/{peak}{kind}_gib" for peak in ("", "peak_") for kind in ("allocated", "reserved")
    }


def test_the_server_offers_the_summaries_as_tables(board):
    tag = "memtools/memory_summary/text_summary"
    assert set(get(board, "plugin/text/tags")[RUN]) - {"memtools/doctor/text_summary"} == {tag}
    entries = get(board, "plugin/text/text", run=RUN, tag=tag)
    assert "<table>" in entries[0]["text"]
    assert "simulated" in entries[0]["text"]
    assert len(entries) == 2


def test_a_browser_draws_the_charts(board, tmp_path):
    titles = {
        "train: allocated and reserved (GiB)": 4,
        "val: allocated and reserved (GiB)": 4,
        "test: allocated and reserved (GiB)": 0,  # one point: no line
        "device: capacity and use (GiB)": 2,
        "composition at the peak (GiB)": 6,
        "training and validation": 2,
    }
    with chromium() as window:
        window.get(f"{board}/#custom_scalars")
        drawn = wait_until(lambda: count_curves(window) >= sum(titles.values()))
        window.save_screenshot(str(tmp_path / "custom_scalars.png"))
        text = seen(window).splitlines()
        assert [title for title in titles if title not in text] == []
        assert drawn, f"{count_curves(window)} curves are drawn, not {sum(titles.values())}"
