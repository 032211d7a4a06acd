"""The verdict on given measurements: what limits a run, its problems, the largest batch, and the gate of `compare`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_memtools.cli.main import main
from lightning_memtools.memory.sizes import GIB, MIB
from lightning_memtools.verdict.judging import THRESHOLDS, judge, largest_batch
from lightning_memtools.verdict.run_facts import RankFacts, RunFacts, summary_of

HEALTHY = {"data": 1.0, "forward": 3.0, "backward": 5.0, "optimizer": 0.5, "rest": 0.5}
PAGE = (Path(__file__).parents[2] / "docs" / "run.md").read_text("utf-8")


def facts(*ranks, **given):
    return RunFacts(ranks=ranks or [RankFacts(steps=100, host_s=HEALTHY)], **given)


def of(steps=100, rank=0, device_s=None, behind=0.0, **seconds):
    given = {"steps": steps, "rank": rank, "host_s": HEALTHY | seconds}
    return RankFacts(**given, device_s=device_s, behind_share=behind)


@pytest.mark.parametrize(
    ("ranks", "limit", "said"),
    [
        ([of()], "compute-bound", "85%"),
        ([of(data=9.0)], "input-bound", "50% of training waits"),
        ([of(validation=9.0)], "validation-bound", "47% of the fit"),
        ([of(rest=12.0)], "overhead-bound", "56% of training"),
        ([of(steps=3)], "unknown", "3 steps measured"),
        ([of(), of(rank=1, data=7.0)], "slow-rank", "rank 1 takes 100 ms until its backward, most of it the wait"),
        ([of(), of(rank=1, forward=6.0)], "slow-rank", "most of it its forward"),
        ([of(), of(rank=1, data=1.2)], "compute-bound", ""),
        # On a GPU: it is as fast as its host queues, takes longer than that, or is a whole step behind.
        ([of(device_s=HEALTHY, behind=0.0)], "overhead-bound", "1.00 times"),
        ([of(device_s=HEALTHY | {"backward": 9.0}, behind=0.0)], "compute-bound", ""),
        ([of(device_s=HEALTHY, behind=0.9)], "compute-bound", ""),
        ([of(data=0.1, device_s=HEALTHY | {"data": 8.0}, behind=0.0)], "input-bound", "47%"),
    ],
)
def test_the_limit_is_that_of_the_shares(ranks, limit, said):
    verdict = judge(facts(*ranks))
    assert verdict.limit == limit
    assert said in verdict.lines[0]
    assert verdict.healthy == (limit == "compute-bound")
    assert len(verdict.lines) <= 10


@pytest.mark.parametrize(
    "given",
    [
        {"skipped_steps": 2},
        {"loss_spikes": 1},
        {"leaks": 1},
        {"waits": ["train.py:31"]},
        {"findings": ["frozen, net: no gradient."] * 9},
        {"ranks": [replace(of(), reserved_bytes=99 * MIB, capacity_bytes=100 * MIB)]},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_run_with_a_problem_is_not_healthy_and_says_so_in_ten_lines(given):
    verdict = judge(RunFacts(**{"ranks": [of()]} | given))
    assert not verdict.healthy
    assert any(line.startswith("Problem: ") for line in verdict.lines)
    assert len(verdict.lines) <= 10


def test_an_error_comes_first():
    assert judge(facts(of(data=9.0), error="ValueError: no")).lines[0] == "error: ValueError: no"


def filled(**given):
    parts = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB, "activations": 4 * GIB, "inputs": 0}
    peaks = {"peak_bytes": 8 * GIB, "reserved_bytes": 9 * GIB}
    known = {"capacity_bytes": 30 * GIB, "composition_bytes": parts, "batch_size": 16}
    return replace(of(), **peaks | known | given)


def test_the_largest_batch_is_by_the_bytes_of_a_sample():
    # 0.25 GiB a sample, in 90% of 30 GiB without 1 GiB of cache and 4 GiB of what does not grow.
    assert largest_batch(filled()) == 88
    assert any("about 88 would fit (16 now)" in line for line in judge(facts(filled())).lines)
    for lacking in ("capacity_bytes", "composition_bytes", "batch_size"):
        assert largest_batch(filled(**{lacking: None})) is None
    assert largest_batch(filled(composition_bytes={"parameters": 8 * GIB, "activations": MIB})) is None


def test_the_fuller_rank_is_named():
    fuller = replace(filled(peak_bytes=12 * GIB), rank=1)
    assert "Ranks: rank 1 is the fullest; rank 0 has a peak of 8.00 GiB." in judge(facts(filled(), fuller)).lines


# --- summary.json and its page


def keys_of(content, prefix="") -> set[str]:
    found = set()
    for key, value in content.items():
        found.add(f"{prefix}{key}")
        if isinstance(value, dict) and key not in {"shares", "composition_bytes"}:
            found |= keys_of(value, f"{prefix}{key}.")
    return found


def test_the_page_has_every_key_and_every_threshold():
    run = facts(filled())
    table = PAGE.split("| key |")[1].split("\n\n")[0]
    documented = {line.split("`")[1] for line in table.splitlines()[2:]}
    assert documented == keys_of(summary_of(run, asdict(judge(run))))
    thresholds = PAGE.split("| threshold |")[1].split("\n\n")[0].splitlines()[2:]
    stated = [line.split("|")[2].strip() for line in thresholds]
    assert stated == [f"{value:.0%}" if value < 1 else f"{value:g}" for value in THRESHOLDS.values()]


# --- compare


def written(folder: Path, name: str, **given) -> str:
    run = facts(filled(**given))
    (folder / name).mkdir()
    (folder / name / "summary.json").write_text(json.dumps(summary_of(run, asdict(judge(run)))))
    return str(folder / name)


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ([], 0),
        (["--max-peak-increase", "30%", "--max-step-time-increase", "60%"], 0),
        (["--max-peak-increase", "20%"], 4),
        (["--max-step-time-increase", "40%"], 4),
    ],
)
def test_compare_is_a_gate(limits, status, tmp_path, capsys):
    before = written(tmp_path, "before")
    slower = {"host_s": HEALTHY | {"forward": 8.0}}
    after = written(tmp_path, "after", peak_bytes=10 * GIB, **slower)
    assert main(["compare", before, after, "--json", *limits]) == status
    shown = json.loads(capsys.readouterr().out)
    figures = {each["name"]: each for each in shown["figures"]}
    assert figures["peak allocated"]["increase"] == pytest.approx(0.25)
    assert figures["step time"]["before"] == pytest.approx(100)
    assert figures["step time"]["increase"] == pytest.approx(0.5)
    assert bool(shown["exceeded"]) == bool(status)


def test_what_is_not_known_does_not_pass_the_gate_and_the_table_says_what_differs(tmp_path, capsys):
    before = written(tmp_path, "before", peak_bytes=None, batch_size=8)
    after = written(tmp_path, "after")
    assert main(["compare", before, after, "--max-peak-increase", "5%"]) == 4
    said = capsys.readouterr()
    assert "peak allocated is not known in both runs" in said.err
    assert re.search(r"batch size +8 +16 ", said.out)


@pytest.mark.parametrize("content", [None, "no JSON", "{}", '{"schema": 99, "verdict": 1, "time": 1, "memory": 1}'])
def test_what_is_no_summary_is_refused(content, tmp_path, capsys):
    other = written(tmp_path, "other")
    path = tmp_path / "summary.json"
    if content is not None:
        path.write_text(content)
    assert main(["compare", other, str(path)]) == 1
    assert "summary" in capsys.readouterr().err
