"""`memtools doctor`, as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memtools.cli.main import main

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def parts(n, *layers):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1))
    return {
        "model": model,
        "dataloader": DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "step": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        "steps": 3,
    }

def healthy():
    print("prints something")
    return parts(32, nn.ReLU())

def needs(size):
    return parts(size)

def three():
    return 3

def pair():
    from tests.doctor.test_diagnose import Logs
    return Logs(), [torch.ones(8, 4), torch.ones(8, 1)]  # as every DataLoader yields it

def broken():
    return parts(33, nn.BatchNorm1d(8))
"""


def memtools(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "project.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lightning_memtools.cli.main", "doctor", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=180)


@pytest.mark.parametrize(("target", "status"), [("healthy", 0), ("pair", 0), ("broken", 1)])
def test_the_exit_status_tells_whether_something_serious_was_found(target, status, tmp_path):
    result = memtools(tmp_path, f"project:{target}", "--json", *(["--steps", "3"] if target == "pair" else []))
    assert result.returncode == status, result.stderr
    report = json.loads(result.stdout)  # and nothing else, whatever the function prints
    assert report["serious"] == status
    assert report["steps"] == 3
    assert [one["check"] for one in report["findings"] if one["severity"] != "info"] == (
        ["batch_norm_one_sample"] if status else []
    )


def test_the_table_and_an_unknown_check(tmp_path):
    result = memtools(tmp_path, "project:broken", "--checks", "batch_norm_one_sample")
    assert result.returncode == 1
    assert "1 check, 3 training steps. Findings: 1, serious: 1." in result.stdout
    result = memtools(tmp_path, "project:broken", "--checks", "batch_norm")
    assert result.returncode == 1
    assert "no check 'batch_norm'. The checks are: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["project:three"],
            "project:three returned a value of type int. Return (model, dataloader), (model, dataloader, ",
        ),
        (["project:needs"], "project:needs cannot be called without arguments: missing a required argument: 'size'"),
        (["project:healthy", "--steps", "0"], "steps=0 watches nothing"),
    ],
)
def test_a_wrong_command_line_is_explained_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "project.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "project", raising=False)
    assert main(["doctor", *arguments]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith(f"memtools: {message}")
    assert not said.out
    del sys.modules["project"]
