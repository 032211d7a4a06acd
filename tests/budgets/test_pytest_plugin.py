"""The plugin, in runs of pytest on small files: marks, recorded peaks, xdist, and what it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401, pytester forgets what is imported within, and this can be imported once
import pytest

import lightning_memtools.budgets.assert_peak_memory  # noqa: F401, as above

pytest_plugins = ["pytester"]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(3)])
        self.kept = []

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

def train(model, n_steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(n_steps):
        loss = model(torch.ones(512, 256)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
TESTS = """
import pytest, torch
from net import Net, train
from lightning_memtools import assert_peak_memory

def step(model, x): return model(x).mean()

@pytest.mark.peak_memory
def test_code(): train(Net())

@pytest.mark.peak_memory("1GiB", gpu="A100 80GB")
def test_two():
    train(Net())

def test_estimate():
    assert_peak_memory(Net(), torch.ones(512, 256), step=step, optimizer=torch.optim.SGD)
    assert_peak_memory(Net(), torch.ones(256, 256), step=step, optimizer=torch.optim.SGD)

def test_without(): pass
"""
BAD = """
import pytest, torch
from net import Net, train

@pytest.mark.peak_memory("1MiB")
def test_over(): train(Net())

@pytest.mark.peak_memory
def test_no_budget(): train(Net())

@pytest.mark.peak_memory("8")
def test_no_unit(): train(Net())

@pytest.mark.peak_memory("8GiB", gpus=2)
def test_unknown_word(): train(Net())

@pytest.mark.peak_memory("8GiB")
def test_allocates_nothing(): pass

@pytest.mark.peak_memory("8GiB")
def test_trains_nothing(): torch.ones(1000)

@pytest.mark.peak_memory("8GiB")
def test_error_of_its_own(): raise KeyError("mine")
"""
SAID = {
    "test_over": "over the budget of 1.00 MiB",
    "test_no_budget": "--memory-record",
    "test_no_unit": "8GiB",
    "test_unknown_word": "gpus",
    "test_allocates_nothing": "nothing was allocated",
    "test_trains_nothing": "no optimizer took a step",
}
FILE = "memory-budgets.json"


@pytest.fixture
def project(pytester, monkeypatch):
    # A test may write net.py twice in a second, in the same size: Python would take the first one's bytecode.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("COLUMNS", "500")  # pytest's summary has the messages in whole
    pytester.makepyfile(net=NET, test_net=TESTS)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider --strict-markers\nfilterwarnings = error\n")
    pytester.syspathinsert()
    return pytester


def run(project, *arguments):
    sys.modules.pop("net", None)
    return project.runpytest_inprocess("-q", *arguments)


def recorded(project):
    return json.loads(Path(project.path, FILE).read_text())["tests"]


def test_bad_input_fails_with_the_name_of_the_test(project):
    project.makepyfile(test_bad=BAD)
    done = run(project, "test_bad.py")
    done.assert_outcomes(failed=len(SAID) + 1)
    text = done.stdout.str()
    for name, said in SAID.items():
        assert any(f"test_bad.py::{name}" in line and said in line for line in text.splitlines()), (name, said)
    assert "KeyError: 'mine'" in text
    assert "lightning_memtools/budgets" not in text.replace(FILE, "")
    assert not Path(project.path, FILE).exists()


def test_peaks_are_recorded_compared_and_what_grew_is_named(project):
    run(project, "--memory-record").assert_outcomes(passed=4)
    rows = recorded(project)
    assert list(rows) == [
        "test_net.py::test_code", "test_net.py::test_estimate", "test_net.py::test_estimate #2", "test_net.py::test_two"
    ]  # fmt: skip
    row = rows["test_net.py::test_two"]
    assert row["gpu"] == "A100 80GB"
    assert row["engine"] == "simulation"
    assert sum(row["categories"].values()) == row["allocated"] <= row["reserved"]
    assert row["modules"]["Net.layers.*"] > 3 * 256 * 256 * 4

    done = run(project, "-W", "error")
    done.assert_outcomes(passed=4)
    assert any("peaks: 4" in line and "engine simulation" in line for line in done.outlines)

    # A change of one line: what each layer makes is kept from step to step.
    changed = NET.strip().replace("x = layer(x).relu()", "x = layer(x).relu(); self.kept.append(x)")
    project.makepyfile(net=changed)
    done = run(project)
    done.assert_outcomes(passed=1, failed=3)
    text = done.stdout.str()
    number = 1 + changed.splitlines().index(next(one for one in changed.splitlines() if "kept.append" in one))
    assert f"net.py:{number}: x = layer(x).relu(); self.kept.append(x)" in text
    assert "activations" in text

    run(project, "--memory-record", "-k", "code").assert_outcomes(passed=1, deselected=3)
    after = recorded(project)
    assert after["test_net.py::test_code"]["allocated"] > rows["test_net.py::test_code"]["allocated"]
    assert {name: after[name] for name in list(rows)[1:]} == {name: rows[name] for name in list(rows)[1:]}


@pytest.mark.parametrize(
    ("edit", "passes"),
    [
        (lambda row: row | {"allocated": row["allocated"] - 1}, True),  # within the tolerance
        (lambda row: row | {"allocated": int(row["allocated"] * 0.98)}, False),
        (lambda row: row | {"allocated": 1, "torch": "2.1.0"}, True),  # not the user's doing
        (lambda row: row | {"allocated": 1, "engine": "cuda"}, True),
    ],
)
def test_tolerance_and_another_torch(project, edit, passes):
    run(project, "--memory-record", "-k", "code")
    rows = {name: edit(row) for name, row in recorded(project).items()}
    Path(project.path, FILE).write_text(json.dumps({"format": 1, "tests": rows}))
    done = run(project, "-k", "code")
    done.assert_outcomes(passed=int(passes), failed=int(not passes), deselected=3)
    row = rows["test_net.py::test_code"]
    if row["allocated"] == 1:
        assert any("not held against the test" in line and "test_code" in line for line in done.outlines)
    if not passes:
        run(project, "-k", "code", "--memory-tolerance", "3%").assert_outcomes(passed=1, deselected=3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"format": 1, "tests": {"a": {"alloc', "Unterminated string"),
        ('{"format": 2, "tests": {}}', "format 2"),
        ('{"format": 1, "tests": {"a": {"reserved": 1}}}', "allocated"),
    ],
)
def test_a_file_that_cannot_be_used_fails_the_tests_that_need_it(project, content, said):
    Path(project.path, FILE).write_text(content)
    done = run(project)
    done.assert_outcomes(passed=1, failed=3)
    for name in ("code", "two", "estimate"):
        assert any(f"test_net.py::test_{name} - " in line and said in line for line in done.outlines)
    assert Path(project.path, FILE).read_text() == content


def test_peaks_are_equal_over_processes_orders_and_under_xdist(project):
    """Recorded by two processes of xdist; equal to the byte in this one, in another order, after another test."""
    project.makepyfile(test_a_first="import torch\ndef test_before(): assert [torch.ones(2**20) for _ in range(9)]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--memory-record"]
    done = subprocess.run(command, cwd=project.path, capture_output=True, text=True, check=False)
    assert "5 passed" in done.stdout, done.stdout + done.stderr
    reversed_order = ("test_a_first.py", *(f"test_net.py::test_{name}" for name in ("two", "estimate", "code")))
    before = recorded(project)
    Path(project.path, FILE).unlink()
    run(project, "--memory-record", *reversed_order).assert_outcomes(passed=4)
    assert recorded(project) == before


def test_the_plugin_loads_neither_torch_nor_lightning_before_a_test_has_a_budget(project):
    project.makepyfile(
        test_light="import sys\ndef test_light(): assert not {'torch', 'lightning', 'rich'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "test_light.py"]
    done = subprocess.run(command, cwd=project.path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout
