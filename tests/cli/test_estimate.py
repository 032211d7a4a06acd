"""`memtools estimate`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lightning_memtools.cli.main import main

TARGET = """
import torch
from torch import nn

def model_and_batch():
    with torch.device("meta"):
        model = nn.Linear(1024, 1024)
    return model, torch.zeros(8, 1024, device="meta"), lambda model, rows: model(rows).sum()

def nothing():
    return 3

number = 4
"""


@pytest.fixture(autouse=True)
def target(tmp_path, monkeypatch):
    (tmp_path / "my_target.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_it_prints_figures_and_gpus(capsys):
    arguments = [
        "--optimizer",
        "Adam",
        "--capacity",
        "1GiB",
        "--max-batch",
        "--snapshot",
        "s.pickle",
        "--picture",
        "m.svg",
    ]
    assert main(["estimate", "my_target:model_and_batch", *arguments]) == 0
    out = capsys.readouterr().out
    assert "1,049,600" in out  # parameters
    assert "It fits in 1GiB." in out
    assert "RTX 4090 24GB" in out
    assert "Largest batch for 1GiB: " in out
    assert pickle.loads(Path("s.pickle").read_bytes())["device_traces"][0]  # noqa: S301, written above
    assert Path("m.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:x"], "No module 'no_such_module'"),
        (["my_target:missing"], "has no 'missing'"),
        (["my_target"], "write MODULE:CALLABLE"),
        (["my_target:number"], "is a int and cannot be called"),
        (["my_target:nothing"], "returned a int. Return (model, batch)"),
        (["my_target:model_and_batch", "--optimizer", "Eve"], "no optimizer 'Eve'"),
        (["my_target:model_and_batch", "--max-batch"], "--max-batch needs --capacity"),
        (["my_target:model_and_batch", "--capacity", "24"], "Not a capacity: '24'"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(arguments, message, capsys):
    assert main(["estimate", *arguments]) == 1
    assert message in capsys.readouterr().err
