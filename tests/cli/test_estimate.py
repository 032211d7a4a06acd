"""`memtools estimate`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
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

def lightning_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1024, 1024)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.layer(batch), torch.zeros(len(batch), dtype=torch.long))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return {"model": Module(), "batch": torch.zeros(8, 1024), "precision": "bf16-mixed", "accumulate": 2}

def one_size():
    return nn.Linear(4, 4), torch.zeros(8, 4), lambda model, rows: model(rows).view(8, 2, 2).sum()

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


def test_it_prints_figures_and_gpus(capfd):
    arguments = ["--optimizer", "Adam", "--capacity", "1GiB", "--max-batch", "--all-gpus", "--snapshot", "s.pickle"]
    assert main(["estimate", "my_target:model_and_batch", *arguments]) == 0
    out = capfd.readouterr().out
    assert "1,049,600" in out  # parameters
    assert "It fits in 1GiB." in out
    assert out.index("It fits in 1GiB.") == 0, "the verdict comes first"
    assert "RTX 4090 24GB" in out
    assert "Largest batch for 1GiB: " in out
    assert pickle.loads(Path("s.pickle").read_bytes())["device_traces"][0]  # noqa: S301, written above


def command(root, *arguments):
    """The command in a process of its own, as a console starts it."""
    here = {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "lightning_memtools.cli.main", "estimate", *arguments]
    return subprocess.run(line, cwd=root, env=os.environ | here, capture_output=True, text=True, check=False)


def test_as_a_command_of_its_own(tmp_path):
    done = command(tmp_path, "my_target:lightning_module", "--capacity", "RTX 4090")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    rows = {cells[0]: cells[-1] for line in done.stdout.splitlines() if len(cells := line.strip().split("  ")) > 1}
    assert rows["at the peak: optimizer"].strip() == "8.01 MiB"  # two moments of 1024 x 1025 floats
    assert "It fits in RTX 4090." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:x"], "No module 'no_such_module'"),
        (["my_target:missing"], "has no 'missing'"),
        (["my_target.py:model_and_batch"], "my_target:model_and_batch"),
        (["my_target:nothing"], "returned a value of type int. Return (model, batch)"),
        (["my_target:model_and_batch", "--optimizer", "Eve"], "no optimizer 'Eve'"),
        (["my_target:model_and_batch", "--snapshot", "nowhere/s.pickle"], "the folder nowhere does not exist"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(arguments, message, capfd):
    assert main(["estimate", *arguments]) == 1
    assert message in capfd.readouterr().err
