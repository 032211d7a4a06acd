"""The Memory tab's routes on a real TensorBoard server, and what the plugin costs at start-up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

import pytest
from torch.utils.tensorboard import SummaryWriter

from lightning_memtools.tensorboard_plugin.memory_tab import STATIC
from tests.browser import get, tensorboard, wait_until
from tests.tensorboard_plugin.logdirs import ATTACK, write_small_run

PLUGIN = "plugin/lightning_memtools"


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    logs = tmp_path_factory.mktemp("routes") / "logs"
    write_small_run(logs / "small", text=ATTACK)
    write_small_run(logs / "other")
    (logs / "bad").mkdir()
    (logs / "bad" / "events.out.tfevents.1").write_bytes(os.urandom(2000))
    (logs.parent / "secret.txt").write_text("secret")
    return logs


@pytest.fixture(scope="module", params=["fast", "slow"])
def board(request, log_dir, tmp_path_factory):
    options = [] if request.param == "fast" else ["--load_fast=false"]
    with tensorboard(log_dir, tmp_path_factory.mktemp("server") / "output", *options) as address:
        yield address


def refused(address, path, **query):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{address}/data/{path}?{urllib.parse.urlencode(query)}")  # noqa: S310, our own server
    return caught.value.code, caught.value.headers["Content-Type"], caught.value.read().decode()


def test_the_tab_is_listed_and_active(board):
    assert wait_until(lambda: get(board, "plugins_listing")["lightning_memtools"]["enabled"])
    listed = get(board, "plugins_listing")["lightning_memtools"]
    assert listed["tab_name"] == "Memory"
    assert "index.js" in json.dumps(listed)


def test_runs_are_listed_with_their_figures(board):
    runs = {run["run"]: run for run in get(board, f"{PLUGIN}/runs")["runs"]}
    assert list(runs) == ["other", "small"]
    assert runs["small"]["stages"]["train"]["peak_allocated"] == {"gib": 1.9, "step": 9}
    assert runs["small"]["step_ms"] == 20.0


@pytest.mark.parametrize("run", ["nosuchrun", "../secret.txt", "/etc/passwd", "..", ATTACK, "x" * 7000, "\x00", ""])
@pytest.mark.parametrize("route", ["run", "step"])
def test_an_unknown_run_is_a_404_with_a_plain_message(board, route, run):
    code, kind, text = refused(board, f"{PLUGIN}/{route}", run=run)
    assert code == 404
    assert kind.startswith("text/plain")
    assert "No run" in text
    assert len(text) < 500


@pytest.mark.parametrize(
    "path", ["../memory_tab.py", "..%2fmemory_tab.py", "%2e%2e/memory_tab.py", "uPlot.LICENSE/..", "x.js"]
)
def test_only_the_tab_s_own_files_are_served(board, path):
    code, _, text = refused(board, f"{PLUGIN}/{path}")
    assert code == 404
    assert "MemoryTab" not in text


def test_script_in_a_report_is_sent_as_json_and_not_as_a_page(board):
    with urllib.request.urlopen(f"{board}/data/{PLUGIN}/run?run=small") as answer:  # noqa: S310, our own server
        assert answer.headers["Content-Type"].startswith("application/json")
        assert "<script" not in json.load(answer)["reports"][0]["html"]


def test_loading_the_plugin_imports_neither_torch_nor_lightning_nor_protobuf_messages():
    code = (
        "import sys, tensorboard.plugins.base_plugin, tensorboard.backend.http_util; before = set(sys.modules)\n"
        "import lightning_memtools.tensorboard_plugin.memory_tab\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new & {'torch', 'lightning', 'numpy', 'google', 'rich', 'psutil'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_a_directory_without_our_tags_leaves_the_tab_inactive(tmp_path):
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        writer.add_scalar("accuracy", 1.0, 0)
    with tensorboard(tmp_path / "logs", tmp_path / "output") as address:
        get(address, "plugin/scalars/tags")
        assert not get(address, "plugins_listing")["lightning_memtools"]["enabled"]
        assert get(address, f"{PLUGIN}/runs") == {"runs": [], "newest": None}


def test_every_module_of_the_tab_is_asked_for_at_once():
    index = (STATIC / "index.js").read_text()
    begun = set(re.findall(r'"([\w.]+)"', re.search(r"const MODULES = \[(.*?)\];", index, re.DOTALL)[1]))
    assert begun == {path.stem for path in STATIC.glob("*.js")} - {"index", "snapshot_page"}


def test_no_line_of_our_scripts_is_longer_than_120():
    long = {(path.name, line) for path in STATIC.glob("*.js") for line in path.read_text().splitlines()
            if len(line) > 120 and path.name != "uPlot.esm.js"}  # fmt: skip
    assert not long
