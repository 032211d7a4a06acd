from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memtools import MemoryMonitor, VirtualDevice
from lightning_memtools.cli.main import main
from lightning_memtools.memory.sizes import MIB
from lightning_memtools.tensorboard_plugin.snapshot_file import NotASnapshotError
from lightning_memtools.tensorboard_plugin.snapshot_timeline import step_view, timeline_from
from tests.browser import chromium, open_page
from tests.lightning_models import Regression, loader, trainer
from tests.tensorboard_plugin.logdirs import ATTACK


class Twins(Regression):
    """Two equal layers: 1 MiB of weights each, Adam."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 1))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, foreach=False)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    with VirtualDevice("1GiB"):
        run = trainer(tmp_path_factory.mktemp("run"), MemoryMonitor(snapshot_at_step=2))
        run.fit(Twins(), loader(2048, 512))
    return Path(run.log_dir)


def test_one_step_is_divided_into_what_it_holds(run_directory):
    view = timeline_from(run_directory / "memtools" / "memory_snapshot_step2_rank0.pickle")
    assert (view["title"], view["rank"]) == ("step 2", 0)
    assert [name for _, name in view["phases"]] == ["forward", "backward", "optimizer"]
    weights = 2 * MIB  # of the two equal layers; the others and all biases have less than 50 KiB
    first = {name: values[0] for name, values in view["parts"].items()}
    assert weights < first["parameters"] < weights + 50 * 1024
    assert 2 * weights < first["optimizer"] < 2 * weights + 100 * 1024
    assert first["gradients"] == pytest.approx(first["parameters"], rel=0.01)  # of the step before
    assert first["inputs"] >= 512 * 4 * 4
    assert max(view["parts"]["activations"]) >= 3 * MIB  # the outputs of three layers: 512 x 512 numbers each
    for at, total in enumerate(view["total"]):
        assert sum(values[at] for values in view["parts"].values()) == total <= view["reserved"][at]
    assert view["peak"]["bytes"] == max(view["total"])
    assert view["peak"]["phase"] in {"forward", "backward"}


def test_holders_of_the_peak_are_named_sorted_by_share_and_add_up_to_it(run_directory):
    view = timeline_from(run_directory / "memtools" / "memory_snapshot_step2_rank0.pickle")
    held = [one["bytes"] * len(one["names"]) for one in view["top"]]
    assert sum(held) == view["peak"]["bytes"]
    assert held[:-1] == sorted(held[:-1], reverse=True)
    named = {name: (one["part"], one["bytes"]) for one in view["top"] for name in one["names"]}
    for layer in (1, 2):
        assert named[f"net.{layer}.weight"] == ("parameters", MIB)
        assert named[f'net.{layer}.weight["exp_avg"]'] == ("optimizer", MIB)
    assert not [name for name in named if "(outside)" in name]


def test_the_view_of_a_run_is_its_snapshot(run_directory, tmp_path):
    assert step_view(run_directory)["timeline"]["title"] == "step 2"
    assert step_view(tmp_path) == {}
    (tmp_path / "memtools").mkdir()
    (tmp_path / "memtools" / "memory_snapshot_step7_rank1.pickle").write_bytes(b"nonsense")
    assert "is no memory snapshot" in step_view(tmp_path)["problem"]


def test_names_of_modules_and_functions_never_become_markup(tmp_path):
    marks = {"step": 1, "rank": 0, "device": 0, "name": ATTACK, "phases": [(0, "forward")], "owned": []}
    frames = [{"filename": "m.py", "line": 3, "name": ATTACK}]
    entry = {"action": "alloc", "addr": 0, "size": MIB, "stream": 0, "time_us": 1, "frames": frames}
    block = {"address": 0, "size": MIB, "requested_size": MIB, "state": "active_allocated", "frames": frames}
    segment = {"device": 0, "address": 0, "total_size": 2 * MIB, "stream": 0, "blocks": [block]}
    for name, extra in (("ours", {"memtools": marks | {"owned": [(0, {})]}}), ("torchs", {})):
        labelled = entry | {"user_metadata": f"forward | {ATTACK}"}
        content = {"segments": [segment], "device_traces": [[labelled]], **extra}
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps(content))
        assert main(["snapshot", str(tmp_path / f"{name}.pickle"), "-o", str(tmp_path / f"{name}.html")]) == 0
    with chromium() as window:
        for name in ("ours", "torchs"):
            open_page(window, (tmp_path / f"{name}.html").as_uri())
            heads = window.execute_script(
                "return [...document.querySelectorAll('thead th')].map((one) => one.innerText)"
            )
            assert heads == (["share", "held", "what", "by"] if name == "ours" else ["share", "held", "by"])
            shown = window.execute_script("return document.querySelector('#memtools').innerText")
            assert ATTACK in shown  # who holds the peak
            found = "return document.querySelectorAll('#memtools img, #memtools script').length"
            assert window.execute_script(found) == 0
            assert window.execute_script("return window.attacked") is None


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(Harmful()), "wants to load posix.system"),
        (pickle.dumps(OrderedDict(segments=[], device_traces=[])), "wants to load collections.OrderedDict"),
        (pickle.dumps({"weights": [1, 2]}), "has no segments and device_traces"),
        (pickle.dumps({"segments": [{"blocks": 3}], "device_traces": []}), "entries make no sense"),
        (b"PK\x03\x04 a zip", "is no pickle"),
        (b"", "is no pickle"),
    ],
)
def test_what_is_no_snapshot_is_refused_and_never_run(content, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.pickle").write_bytes(content)
    with pytest.raises(NotASnapshotError, match=words):
        timeline_from(tmp_path / "file.pickle")
    assert main(["snapshot", "file.pickle"]) == 1
    assert "is no memory snapshot" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"file.pickle"}


def test_the_page_shows_the_peak_and_its_holders(run_directory, tmp_path):
    source = run_directory / "memtools" / "memory_snapshot_step2_rank0.pickle"
    assert main(["snapshot", str(source), "-o", str(tmp_path / "page.html")]) == 0
    with chromium() as window:
        open_page(window, (tmp_path / "page.html").as_uri())
        text = window.execute_script("return document.querySelector('#memtools').innerText")
        for words in (
            "Memory over step 2",
            "Peak allocated",
            "optimizer state",
            "of 1.00 MiB: ",
            "total at the peak",
            "Twins.net.1",
        ):
            assert words in text, words
        window.save_screenshot(str(tmp_path / "snapshot.png"))
        assert [line for line in window.get_log("browser") if line["level"] == "SEVERE"] == []
