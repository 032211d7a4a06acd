"""The real libraries of docs/ecosystem.md, where they are installed: what the page shows, and what arrives in them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from lightning_memtools import VirtualDevice, default_callbacks
from tests.lightning_models import Regression, loader, trainer

PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"
BLOCKS = re.findall(r'```python(?: title="Needs (\w+)")?\n(.*?)```', PAGE.read_text("utf-8"), re.DOTALL)
NEEDED = [name for name, _ in BLOCKS if name]


@pytest.fixture
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")


def is_installed(name: str) -> bool:
    return not name or importlib.util.find_spec(name) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("needed", NEEDED)
def test_a_block_that_needs_a_library_runs_after_those_before_it(needed, tmp_path):
    if not is_installed(needed):
        pytest.skip(f"{needed} is not installed")
    names: dict[str, Any] = {"__name__": "__main__"}
    for name, block in BLOCKS[: [name for name, _ in BLOCKS].index(needed) + 1]:
        if name in {"", needed}:
            exec(compile(block, str(tmp_path / "block.py"), "exec"), names)  # noqa: S102, our own page


def fit(root: Path, logger: Any) -> None:
    with VirtualDevice("1GiB"):
        trainer(root, *default_callbacks(), logger=logger, max_epochs=2).fit(Regression(), loader(), loader(16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_in_a_folder")
def test_weights_and_biases_offline_gets_curves_and_reports(tmp_path):
    if not is_installed("wandb"):
        pytest.skip("wandb is not installed")
    logger = WandbLogger(project="demo", save_dir=tmp_path, offline=True)
    fit(tmp_path, logger)
    summary = dict(logger.experiment.summary)
    assert summary["memory/capacity_gib"] == 1.0
    assert summary["memory/train/peak_allocated_gib"] > 0
    assert summary["loss/val"] > 0
    assert summary["memtools/memory_summary"]["_type"] == "table-file"
    logger.experiment.finish()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_in_a_folder")
def test_mlflow_gets_curves_and_reports_as_artifacts(tmp_path):
    if not is_installed("mlflow"):
        pytest.skip("mlflow is not installed")
    logger = MLFlowLogger(
        "demo", tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}", artifact_location=str(tmp_path / "artifacts")
    )
    fit(tmp_path, logger)
    client, run = logger.experiment, logger.run_id
    assert client.get_run(run).data.metrics["memory/capacity_gib"] == 1.0
    peaks = [point.value for point in client.get_metric_history(run, "memory/train/peak_allocated_gib")]
    assert len(peaks) == 8
    assert min(peaks) > 0
    reports = {Path(one.path).name for one in client.list_artifacts(run, "memtools")}
    assert reports == {"memory_summary.md", "doctor.md"}
