"""Two ranks on the CPU over gloo, as a user's script starts them."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

import pytest

from lightning_memtools.memory.sizes import MIB
from lightning_memtools.tensorboard_plugin.snapshot_timeline import timeline_from
from tests.event_files import scalars
from tests.two_processes import run_script


@pytest.fixture(scope="module")
def run_under(tmp_path_factory):
    """Gives the folder that a run on two ranks under a strategy left behind; each is run once."""

    @functools.cache
    def run(strategy):
        root = tmp_path_factory.mktemp(strategy)
        result = run_script(Path(__file__).with_name("ddp_run.py"), root, strategy)
        (root / "stdout").write_text(result.stdout)
        return root

    return run


@pytest.fixture(params=["ddp", "ddp_spawn", "fsdp2"])
def root(request, run_under):
    return run_under(request.param)


def ran_tests(root):
    return not root.name.startswith("ddp_spawn")  # there the script stops after fit


def test_rank_zero_alone_writes(root):
    writers = {path.name.split(".")[-2] for path in root.rglob("*.tfevents.*")}  # the process id is in the name
    assert len(writers) == 1
    assert len([*root.rglob("metrics.csv")]) == 1
    calls = ["fit", "test"] if ran_tests(root) else ["fit"]
    reports = [path.name for path in root.rglob("memtools/*") if path.suffix != ".pickle"]  # each rank has its snapshot
    assert sorted(reports) == [f"memory_summary_{call}.md" for call in calls]
    assert (root / "stdout").read_text().count("highest of 2 ranks") == len(calls)  # one block for each


def test_memory_is_the_maximum_and_says_which_rank_holds_it(root):
    curves = scalars(root / "board")
    peak = "memory/train/peak_allocated_gib"
    for name in (peak, f"{peak}_min", "memory/train/peak_rank", f"{peak}/rank0", f"{peak}/rank1"):
        assert len(curves[name]) == 3
    for whole, least, rank, first, second in zip(
        curves[peak], curves[f"{peak}_min"], curves["memory/train/peak_rank"], curves[f"{peak}/rank0"],
        curves[f"{peak}/rank1"], strict=True,
    ):  # fmt: skip
        assert whole[1] == second[1] > 40 / 1024 > first[1] == least[1]
        assert rank[1] == 1
    if ran_tests(root):
        assert [rank for _, rank in curves["memory/test/peak_rank"]] == [0]
    (row,) = [line for line in summary(root).splitlines() if line.startswith("| train")]
    assert float(row.split("|")[2].split()[0]) >= 40


def summary(root):
    (path,) = root.rglob("memory_summary_fit.md")
    return path.read_text()


def test_losses_are_means_over_both_ranks(root):
    ranks = [json.loads((root / f"losses{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] != ranks[1]
    curves = scalars(root / "board")
    both = [(a + b) / 2 for a, b in zip(ranks[0]["train"], ranks[1]["train"], strict=True)]
    assert len(both) == 3
    assert curves["loss/train"] == [
        (1, pytest.approx((both[0] + both[1]) / 2, rel=1e-5)),
        (2, pytest.approx(both[2], rel=1e-5)),
    ]
    val = [loss for rank in ranks for loss in rank["val"]]
    assert curves["loss/val"] == [(2, pytest.approx(sum(val) / len(val), rel=1e-5))]
    assert len(curves["grad/norm"]) == 2


@pytest.mark.parametrize("strategy", ["ddp_spawn", "fsdp2"])
def test_the_gradient_norm_is_that_of_the_whole_gradient_under_every_strategy(strategy, run_under):
    (_, first), (_, second) = scalars(run_under("ddp") / "board")["grad/norm"]
    norms = scalars(run_under(strategy) / "board")["grad/norm"]
    assert norms == [(1, pytest.approx(first, rel=1e-4)), (2, pytest.approx(second, rel=1e-4))]


def test_the_other_logger_holds_the_same(root):
    (file,) = root.rglob("metrics.csv")
    rows = [*csv.DictReader(file.read_text().splitlines())]
    table = [(int(row["step"]), float(row["loss/train"])) for row in rows if row.get("loss/train")]
    assert table == [(step, pytest.approx(value, rel=1e-5)) for step, value in scalars(root / "board")["loss/train"]]


def test_each_rank_writes_a_snapshot_of_its_own_step(root):
    peaks = []
    for rank in (0, 1):
        view = timeline_from(root / "board" / "memtools" / f"memory_snapshot_step2_rank{rank}.pickle")
        assert (view["title"], view["rank"]) == ("step 2", rank)
        assert [name for _, name in view["phases"]] == ["forward", "backward", "optimizer"]
        peaks.append(view["peak"]["bytes"])
    assert peaks[0] < 40 * MIB <= peaks[1]  # a step of rank 1 takes 40 MiB, one of rank 0 takes 1 MiB
