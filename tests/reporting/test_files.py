"""Report files: the path, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memtools.reporting.files import (
    NotWritten,
    report_directory,
    write_report,
    write_report_on_rank_zero,
    write_report_or_warn,
)
from lightning_memtools.reporting.ranks import RankGather
from tests.lightning_models import trainer


def test_reports_go_below_the_log_directory_or_where_the_callback_says(tmp_path):
    run = trainer(tmp_path)
    assert report_directory(run) == Path(run.log_dir or "") / "memtools"
    assert report_directory(run, str(tmp_path / "mine")) == tmp_path / "mine"


def test_a_dry_run_keeps_no_files_and_says_so(tmp_path):
    none = report_directory(trainer(tmp_path, fast_dev_run=True))
    assert none == NotWritten("not written: this run keeps no files (fast_dev_run)")
    assert write_report(none, "a.md", "text") == none
    assert write_report_or_warn(none, "a.md", "text") is None  # and no warning


def test_a_run_without_a_logger_keeps_files_only_where_the_callback_says(tmp_path):
    run = trainer(tmp_path, logger=False)
    assert report_directory(run) == NotWritten("not written: this run keeps no files (logger=False)")
    assert report_directory(run, "here") == Path("here")


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
    with pytest.warns(UserWarning, match=r"The report a\.md could not be written: .* Training goes on\."):
        assert write_report_or_warn(tmp_path / "file", "a.md", "text") is None
