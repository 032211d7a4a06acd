"""A report whose checks were not all reached in time, finished from the files beside it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memtools import OOMReport, VirtualDevice
from lightning_memtools.cli.main import main
from tests.lightning_models import trainer
from tests.oom_models import Layers
from tests.prepared.starting import prepared_python


class HyperLayers(Layers):
    """Its arguments are saved, so it can be made again whatever they are."""

    def __init__(self, n: int, width: int, batch: int) -> None:
        super().__init__(n, width=width, batch=batch)
        self.save_hyperparameters()


class Normalized(Layers):
    """A layer whose memory VirtualDevice(cuda_like=True) follows by a rule on fake tensors."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch=batch)
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.LayerNorm(16384))


def report_of(root: Path, call: str, capacity: str, model: Layers, *, cuda_like: bool = False) -> Path:
    run = trainer(root, OOMReport(directory=str(root)), logger=False, limit_val_batches=0)
    with VirtualDevice(capacity, cuda_like=cuda_like), pytest.raises(torch.OutOfMemoryError):
        getattr(run, call)(model)
    (path,) = root.glob("oom-*.md")
    return path


def shortened(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("lightning_memtools.oom.oom_reporter.CHECKS_S", seconds)


def without_files(text: str) -> str:
    return text.split("## Files", maxsplit=1)[0]


@pytest.mark.parametrize(
    "failure",
    [
        ("fit", "280MiB", lambda: Layers(batch=48)),
        ("predict", "320MiB", lambda: Layers(val_batch=96)),
        ("fit", "150MiB", lambda: HyperLayers(2, 2000, 64)),
    ],
    ids=["training", "prediction", "hyperparameters"],
)
def test_a_finished_report_is_that_of_unlimited_time(failure, tmp_path, monkeypatch, capsys):
    call, capacity, model = failure
    shortened(monkeypatch, 0.0)
    path = report_of(tmp_path / "short", call, capacity, model())
    command = f"memtools oom-report {path} --finish"
    assert f"To make all checks, run `{command}`." in path.read_text()
    assert command in capsys.readouterr().out.replace("\n", "")
    shortened(monkeypatch, 600.0)
    full = report_of(tmp_path / "full", call, capacity, model()).read_text()
    assert "oom-report" not in full
    assert not list((tmp_path / "full").glob("*-step.pt"))
    capsys.readouterr()
    assert main(["oom-report", str(path), "--finish"]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert re.search(r"^1\. ", path.read_text(), re.MULTILINE)
    assert without_files(path.read_text()) == without_files(full)


def test_a_step_that_fails_within_a_rule_on_fake_tensors_is_saved_with_its_batch(tmp_path, monkeypatch):
    shortened(monkeypatch, 0.0)
    path = report_of(tmp_path, "fit", "40MiB", Normalized(batch=48), cuda_like=True)
    assert main(["oom-report", str(path), "--finish"]) == 0
    found = re.search(r"Use training batches of (\d+)", path.read_text())
    assert found is not None
    run = trainer(tmp_path, logger=False, limit_val_batches=0)
    with VirtualDevice("40MiB", cuda_like=True):
        run.fit(Normalized(batch=int(found[1])))


def test_another_process_asks_for_trust_and_then_finishes(tmp_path, monkeypatch):
    shortened(monkeypatch, 0.0)
    path = report_of(tmp_path, "fit", "280MiB", Layers(batch=48))
    command = [prepared_python(), "-m", "lightning_memtools", "oom-report", str(path), "--finish"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert refused.returncode == 1
    assert "importing tests.oom_models" in refused.stderr
    assert "--trust" in refused.stderr
    assert "This was not checked" in path.read_text()
    done = subprocess.run([*command, "--trust"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "This was not checked" not in path.read_text()


def test_a_module_that_cannot_be_made_again_is_given(tmp_path, monkeypatch, capsys):
    shortened(monkeypatch, 0.0)
    path = report_of(tmp_path, "fit", "150MiB", Layers(n=2, width=2000, batch=64))
    assert main(["oom-report", str(path), "--finish"]) == 1
    said = capsys.readouterr().err
    assert "heavy.weight" in said
    assert "--model package.function" in said
    assert main(["oom-report", str(path), "--finish", "--model", "tests.oom.test_saved_step.wide_layers"]) == 0
    assert "This was not checked" not in path.read_text()


def wide_layers() -> Layers:
    return Layers(n=2, width=2000, batch=64)


def test_a_file_that_is_not_text_is_not_a_report(tmp_path, capsys):
    path = tmp_path / "oom.md"
    path.write_bytes(bytes(range(128, 256)))
    assert main(["oom-report", str(path)]) == 1
    assert capsys.readouterr().err == f"memtools: {path} is not a report: it is not text.\n"


def test_a_report_without_its_step_says_so(tmp_path, capsys):
    path = tmp_path / "oom-train-step0.md"
    path.write_text("# Out of memory\n")
    assert main(["oom-report", str(path)]) == 0
    assert capsys.readouterr().out == "# Out of memory\n"
    assert main(["oom-report", str(path), "--finish"]) == 1
    assert "oom-train-step0-step.pt" in capsys.readouterr().err
    (tmp_path / "oom-train-step0-step.pt").write_bytes(b"nonsense")
    assert main(["oom-report", str(path), "--finish"]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert main(["oom-report", str(tmp_path / "none.md")]) == 1
