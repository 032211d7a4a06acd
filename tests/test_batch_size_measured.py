"""The figures in docs/batch-size-compared.md against the measurements, and some cases measured again."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from lightning_memtools import BatchSizeTuner, VirtualDevice
from lightning_memtools.memory.sizes import parse_size
from tests.batch_size_docs import MANUAL, PAGE, TOOLS, both_tables, code, large, measured_part, results
from tests.batch_size_models import MODELS, trainer_for
from tests.fake_training import fake_tensors, fakes_of

ROWS = results()["rows"]


def test_the_measurements_cover_what_they_should():
    assert {row["model"] for row in ROWS} == set(MODELS)
    assert len(MODELS) >= 8
    assert len({row["capacity"] for row in ROWS}) >= 3
    assert any(row["used_by_others"] != "0MiB" for row in ROWS)


def test_never_over_the_true_maximum_and_never_far_below():
    shares = [row["BatchSizeTuner"]["share_of_true_maximum"] for row in ROWS]
    assert max(shares) <= 1
    assert min(shares) >= 0.9
    assert statistics.median(shares) >= 0.97
    assert min(share for share, row in zip(shares, ROWS, strict=True) if large(row)) >= 0.96


def test_never_below_the_configured_size_and_every_fit_that_follows_runs():
    for row in ROWS:
        assert row["BatchSizeTuner"]["size"] >= min(row["configured_size"], row["true_maximum"])
        assert row["fit_of_50_steps_on_cuda"]["outcome"] == "fits"


def test_a_size_that_is_found_was_run():
    for row in ROWS:
        ran = [size for size, outcome in row["BatchSizeTuner"]["tried"] if outcome == "fits"]
        assert max(ran) == row["BatchSizeTuner"]["size"]


def test_the_pages_show_the_measurements():
    page = PAGE.read_text(encoding="utf-8")
    assert measured_part(page).strip() == both_tables().strip()
    words = " ".join(page.split())
    for rows in ([row for row in ROWS if large(row)], [row for row in ROWS if not large(row)]):
        ours = [row["BatchSizeTuner"] for row in rows]
        quick = sum(one["trials"] <= 3 for one in ours)
        assert f"{quick} of {len(rows)} searches took 3 trials or fewer, none more than {_most(ours)}" in words
        assert f"at least {_least(ours):.1%} of the true maximum" in words
    for tool in TOOLS[1:]:
        found = [row[tool] for row in ROWS]
        over = sum(one["share_of_true_maximum"] > 1 and "failure" not in one for one in found)
        assert f"it found as little as {_least(found):.0%} of it, exceeded it {over} times" in words
        assert f"ended {sum('failure' in one for one in found)} fits with the model's own error" in words
    for other in (MANUAL, MANUAL.with_name("measurements.md")):
        said = " ".join(other.read_text(encoding="utf-8").split())
        ours = [row["BatchSizeTuner"] for row in ROWS]
        assert f"at least {_least(ours):.1%} of it in {len(ROWS)} searches" in said


def _least(found: list[dict[str, Any]]) -> float:
    return min(float(one["share_of_true_maximum"]) for one in found if "failure" not in one)


def _most(found: list[dict[str, Any]]) -> int:
    return max(int(one["trials"]) for one in found)


# Lightning asks whether a length is zero, which a fake tensor cannot say.
@pytest.mark.filterwarnings("ignore:Total length of `FakeLoader`")
@pytest.mark.parametrize("name", ["batchnorm", "contrastive", "many weights"])
def test_a_measured_case_gives_the_same_trials_again(tmp_path, name):
    """The present search finds the size that was measured."""
    row = next(row for row in ROWS if row["model"] == name and row["capacity"] == "2GiB")
    step = {"contrastive": 64, "batchnorm": 2}.get(name, 1)
    tuner = BatchSizeTuner(stages=("train",), multiple_of=step)
    with fake_tensors(VirtualDevice("2GiB")):
        trainer_for(MODELS[name], tmp_path, tuner, max_steps=0, limit_val_batches=0).fit(fakes_of(MODELS[name])())
    assert [[trial.size, trial.outcome] for trial in tuner.result.trials] == row["BatchSizeTuner"]["tried"]
    assert tuner.result.peaks["train"] <= 0.95 * parse_size("2GiB")


def test_every_size_of_a_small_device_on_real_tensors(tmp_path):
    """The true maximum, found by running every size in plain fits without the tuner."""
    kind, capacity = MODELS["dropout"], 128 << 20

    def fits(size):
        model, device = kind(size), VirtualDevice(f"{int(capacity * 0.95)}B")
        with device:
            device.track(model)
            try:
                trainer_for(kind, tmp_path, limit_val_batches=0).fit(model)
            except torch.OutOfMemoryError:
                return False
        return device.stats().alloc_retries == 0

    *_, truth = (size for size in range(1, 13) if fits(size))
    assert 4 < truth < 12
    tuner = BatchSizeTuner(stages=("train",))
    with VirtualDevice(f"{capacity}B"):
        trainer_for(kind, tmp_path, tuner, max_steps=0, limit_val_batches=0).fit(kind())
    assert tuner.result.sizes["train"] == truth


def test_the_pages_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(code(), "train.py", "exec"), names)  # noqa: S102, our own page
    result = names["tuner"].result
    assert result.sizes["train"] > 1000
    assert result.peaks["train"] <= 0.95 * 64 * 2**20
    assert result.table() in capsys.readouterr().out
