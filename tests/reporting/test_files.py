"""Report files: the path, or the reason why there is none."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lightning_memtools import HaltOnNaN, LossSpikes, NonFiniteError
from lightning_memtools.reporting.files import (
    NotWritten,
    report_directory,
    write_report,
    write_report_on_rank_zero,
    write_report_or_warn,
)
from lightning_memtools.reporting.ranks import RankGather
from tests.lightning_models import Regression, loader, trainer


def test_reports_go_below_the_log_directory_or_where_the_callback_says(tmp_path):
    run = trainer(tmp_path)
    assert report_directory(run) == Path(run.log_dir or "") / "memtools"
    assert report_directory(run, str(tmp_path / "mine")) == tmp_path / "mine"


class LeavesTheDirectory(Regression):
    """Changes the working directory in its first step, and fails in its second."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            os.chdir("elsewhere")
        return super().training_step(batch, batch_idx) * (1 if batch_idx == 0 else float("nan"))


@pytest.mark.parametrize("made", [HaltOnNaN, LossSpikes])
def test_a_relative_directory_is_meant_where_the_program_was_when_it_was_given(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    with pytest.raises(NonFiniteError, match=re.escape(f"{tmp_path}/reports/nonfinite-step1-report.md")):
        trainer(tmp_path, made(directory="reports"), logger=False).fit(LeavesTheDirectory(), loader())
    assert {path.name for path in Path(tmp_path, "reports").iterdir()} >= {"nonfinite-step1-report.md"}
    assert list(Path(tmp_path, "elsewhere").iterdir()) == []


def test_a_dry_run_keeps_no_files_and_says_so(tmp_path):
    none = report_directory(trainer(tmp_path, fast_dev_run=True))
    assert "(fast_dev_run)" in none.reason
    assert not none.is_failure
    assert write_report(none, "a.md", "text") == none
    assert write_report_or_warn(none, "a.md", "text") is None  # and no warning


def test_a_run_without_a_logger_keeps_files_only_where_the_callback_says(tmp_path):
    run = trainer(tmp_path, logger=False)
    assert "(logger=False)" in report_directory(run).reason
    assert report_directory(run, "here") == Path("here")


def test_a_run_that_keeps_its_files_elsewhere_than_in_a_folder_says_how_to_get_reports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a local folder of the address's name would appear
    run = Trainer(default_root_dir="memory://runs", logger=Database())
    address = os.path.join("memory://runs", "experiment", "run7")  # noqa: PTH118
    none = report_directory(run)
    assert address in none.reason
    assert "directory=" in none.reason
    assert not none.is_failure
    assert write_report(none, "a.md", "text") == none
    assert report_directory(run, str(tmp_path / "mine")) == tmp_path / "mine"
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_written_into_a_new_directory(tmp_path):
    path = write_report(tmp_path / "new" / "er", "a.md", "gr\u00f6\u00dfe")
    assert path == tmp_path / "new" / "er" / "a.md"
    assert path.read_text(encoding="utf-8") == "gr\u00f6\u00dfe"
    assert write_report_on_rank_zero(tmp_path, "b.md", "b", RankGather()) == tmp_path / "b.md"


def test_a_failure_gives_the_reason(tmp_path):
    (tmp_path / "file").write_text("in the way")
    failed = write_report(tmp_path / "file", "a.md", "text")
    assert isinstance(failed, NotWritten)
    assert failed.is_failure
    assert failed.reason.startswith("could not be written: [Errno")
    assert write_report_on_rank_zero(tmp_path / "file", "a.md", "text", RankGather()) == failed
    with pytest.warns(UserWarning, match=r"a\.md could not be written: "):
        assert write_report_or_warn(tmp_path / "file", "a.md", "text") is None


class Database(Logger):
    """Keeps nothing in files, as MLflow on a database."""

    name = "experiment"
    version = "run7"
    save_dir = None

    def log_metrics(self, metrics, step=None):
        """Keep nothing."""

    def log_hyperparams(self, params, *args, **kwargs):
        """Keep nothing."""


def test_a_page_that_a_full_disk_cuts_off_is_not_left_behind(tmp_path, monkeypatch):
    whole = Path.write_text

    def cut_off(self, text, **options):
        if len(text) > 5000:
            whole(self, text[:100], **options)
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, text, **options)

    (tmp_path / "x").mkdir()
    assert isinstance(write_report(tmp_path / "x", "page.md", "short"), Path)
    monkeypatch.setattr(Path, "write_text", cut_off)
    assert "No space left" in str(write_report(tmp_path / "x", "page.md", "long" * 2000))
    assert [(one.name, one.read_text()) for one in (tmp_path / "x").iterdir()] == [("page.md", "short")]
