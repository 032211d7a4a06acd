"""Runs that several tests look at: each takes the seconds in which torch and Lightning are imported."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest

from lightning_memtools.null_cuda.dry_run.api import dry_run
from lightning_memtools.null_cuda.dry_run.result import DryRunResult
from tests.null_cuda.dry_run_scripts import TRAINER, write_script


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    return partial(write_script, tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> DryRunResult:
    """The dry run of the Trainer's script with batches of 64."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder):
        return dry_run(write_script(folder, TRAINER), ["64"])
