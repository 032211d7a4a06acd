"""Runs Lightning's own tests with `default_callbacks()` in every Trainer and without, and lists what newly fails.

python lightning_tests.py GIT_DIRECTORY [FILE ...]

GIT_DIRECTORY is a clone of github.com/Lightning-AI/pytorch-lightning; its tag nearest below the installed version is
read, and nothing of it is kept. Files are named as in the clone, below tests/tests_pytorch; without any, all of the
loops, trainer, callbacks, checkpointing and tuner tests run, which takes half an hour. The results of other files stay
in results/lightning_tests.json.

Tests that start processes with ddp_spawn are left out, by name: each takes minutes, because each process imports
everything anew. A single test that takes longer than a minute fails for that. What fails with our callbacks runs again
without them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
from machine import RESULTS, save

FOLDERS = ("loops", "trainer", "callbacks", "checkpointing", "tuner")
LIMIT_S = 1200
"""For one file, with or without our callbacks."""

WHOLE = "the file as a whole"

RULES = """
import inspect
import json
import signal
from pathlib import Path
import pytest
def pytest_collection_modifyitems(config, items):
    spawning = [item for item in items if "ddp_spawn" in item.name or "ddp_spawn" in inspect.getsource(item.function)]
    items[:] = [item for item in items if item not in spawning]
    names = [item.name for item in spawning]
    config.hook.pytest_deselected(items=spawning)
    Path(config.rootpath, "left_out.json").write_text(json.dumps(names))
def over(signal, frame):
    raise TimeoutError("took longer than a minute")
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(60)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
"""

PLUGIN = """
import lightning.pytorch as pl
from lightning_memtools import default_callbacks
plain = pl.Trainer.__init__
def with_ours(self, *args, **kwargs):
    given = kwargs.get("callbacks") or []
    kwargs["callbacks"] = [*(given if isinstance(given, (list, tuple)) else [given]), *default_callbacks()]
    plain(self, *args, **kwargs)
with_ours.__wrapped__ = plain
pl.Trainer.__init__ = with_ours
"""

INHERENT = {
    "names this library: may be its own failure, to be looked into": (
        r"memtools|MemoryMonitor|LossCurves|EmptyCache|OOMReport|HaltOnNaN|TrainingDoctor"
    ),
    "counts, lists or compares the Trainer's callbacks": r"callbacks|Callback",
    "counts or lists what a logger gets": r"log_metrics|logged|metrics|logger|add_scalar",
    "counts or lists files": r"\.ckpt|listdir|PosixPath|\.csv|events",
    "counts calls of hooks or of functions": r"call_count|called|Expected '|hook|mock_calls|assert_called",
    "replaces the clock by a list of times, of which the callbacks take some": (
        r"^StopIteration$|^AssertionError: Expected \w+/time"
    ),
    "counts warnings or output": r"warn|Warning|stdout|capsys",
}
"""Why a test fails that is no defect: what it asserts is the absence of other callbacks. By patterns of its message."""

COMPARES_CALLBACKS = "compares the Trainer's callbacks with a list"
COMPARES_LOGGED = "compares all that a logger gets with a list"
WITHOUT_SETUP = "runs a loop of a Trainer without its setup, and so without the callbacks' setup hooks"
NAN_LOSS = "logs a validation loss that is NaN or Inf, for which HaltOnNaN ends the fit with an error, as its page says"
LOOKED_INTO = {
    "test_early_stopping_on_non_finite_monitor": NAN_LOSS,
    "test_early_stopping_reasons": NAN_LOSS,
    "test_checkpoint_callbacks_are_last": COMPARES_CALLBACKS,
    "test_attach_model_callbacks": COMPARES_CALLBACKS,
    "test_configure_external_callbacks": COMPARES_CALLBACKS,
    "test_logger_after_fit_predict_test_calls": COMPARES_LOGGED,
    "test_validation_step_log_with_tensorboard": COMPARES_LOGGED,
    "test_log_metrics_epoch_step_values": COMPARES_LOGGED,
    "test_log_every_n_steps": COMPARES_LOGGED,
    "test_eval_step_logging": COMPARES_LOGGED,
    "test_log_on_train_start": COMPARES_LOGGED,
    "test__eval_step__flow": WITHOUT_SETUP,
    "test__training_step__epoch_end__flow_scalar": WITHOUT_SETUP,
    "test_training_step_no_return_when_even": WITHOUT_SETUP,
    "test_backward_count_simple": "counts calls of Tensor.backward, those on TrainingDoctor's fake tensors among them",
}
"""The same of tests that somebody read, by name."""


def tag_of(git: Path) -> str:
    tags = subprocess.run(["git", "-C", git, "tag"], capture_output=True, text=True, check=True).stdout.split()  # noqa: S607
    numbers = [tuple(map(int, tag.split("."))) for tag in tags if re.fullmatch(r"\d+\.\d+\.\d+", tag)]
    installed = tuple(map(int, lightning.__version__.split(".")[:3]))
    return ".".join(map(str, max(one for one in numbers if one <= installed)))


def outcomes(sources: Path, file: str, *, ours: bool, only: Sequence[str] = ()) -> dict[str, str]:
    """Return for each test, or for those named, "" if it passed or was skipped, else the first line of its message."""
    report = sources / "report.xml"
    (sources / "memtools_everywhere.py").write_text(PLUGIN)
    (sources / "memtools_rules.py").write_text(RULES)
    report.unlink(missing_ok=True)
    (sources / "left_out.json").unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(sources / "tests"), str(sources)]),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "memtools_rules",
        "-c",
        os.devnull,
        "--rootdir",
        sources,
    ]
    command += ["-p", "memtools_everywhere"] if ours else []
    path = sources / "tests" / "tests_pytorch" / file
    command += [f"--junitxml={report}", *([f"{path}::{name}" for name in only] or [str(path)])]
    try:
        subprocess.run(
            command, env=environment, cwd=sources / "tests", timeout=LIMIT_S, check=False, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return {WHOLE: f"took longer than {LIMIT_S} s"}
    if not report.exists():
        return {WHOLE: "pytest ended without a report"}
    found = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314, written by the run above
        bad = [one for one in case if one.tag in {"failure", "error"}]
        said = (bad[0].get("message") or "no message").splitlines()[0][:200] if bad else ""
        found[case.get("name", "")] = said.replace(str(sources), "")
    return found


def compared(sources: Path, file: str) -> dict[str, Any]:
    ours = outcomes(sources, file, ours=True)
    noted = sources / "left_out.json"  # missing where a file ends before its tests are collected
    left_out = json.loads(noted.read_text()) if noted.exists() else []
    failed = [name for name, said in ours.items() if said]
    is_whole = WHOLE in failed
    without = outcomes(sources, file, ours=False, only=() if is_whole else failed) if failed else {}
    return {
        "tests": len(ours),
        "fail_without": sum(map(bool, without.values())),
        "newly_fail": {
            name: {"message": ours[name], "why": why_inherent(name, ours[name])}
            for name in failed
            if not without.get(name)
        },
        **({"left_out_ddp_spawn": left_out} if left_out else {}),
    }


def why_inherent(name: str, said: str) -> str:
    known = LOOKED_INTO.get(name.partition("[")[0])
    return known or next((why for why, pattern in INHERENT.items() if re.search(pattern, said)), "not sorted")


def main() -> None:
    git, files = Path(sys.argv[1]), sys.argv[2:]
    tag = tag_of(git)
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        archive = subprocess.run(["git", "-C", git, "archive", tag, "tests"], capture_output=True, check=True)  # noqa: S607
        subprocess.run(["tar", "-x", "-C", sources], input=archive.stdout, check=True)  # noqa: S607
        root = sources / "tests" / "tests_pytorch"
        known = [str(one.relative_to(root)) for name in FOLDERS for one in sorted((root / name).rglob("test_*.py"))]
        for file in files or known:
            measured = compared(sources, file)
            print(file, measured, flush=True)
            path = RESULTS / "lightning_tests.json"
            earlier: dict[str, Any] = json.loads(path.read_text())["files"] if path.exists() else {}
            save("lightning_tests", {"tag": tag, "files": dict(sorted((earlier | {file: measured}).items()))})


if __name__ == "__main__":
    main()
