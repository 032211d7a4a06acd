from __future__ import annotations

import pytest

from lightning_memtools.oom.notice_board import NoticeBoard, OOMNotice

NOTICE = OOMNotice(1, "Out of memory on cuda:1.")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))


@pytest.mark.usefixtures("temporary")
def test_the_first_notice_stands_and_others_read_it(tmp_path):
    one, other = (NoticeBoard(tmp_path / "memtools", "run") for _ in range(2))
    assert other.read() is None
    assert one.leave(NOTICE)
    assert not other.leave(OOMNotice(0, "later"))
    assert other.read() == NOTICE
    assert NoticeBoard(tmp_path / "memtools", "another run").read() is None


@pytest.mark.usefixtures("temporary")
def test_without_a_directory_a_temporary_one_is_used():
    assert NoticeBoard(None, "run").leave(NOTICE)
    assert NoticeBoard(None, "run").read() == NOTICE


def test_if_no_file_can_be_written_each_rank_is_the_first(tmp_path):
    (tmp_path / "taken").write_text("a file")
    board = NoticeBoard(tmp_path / "taken", "run")
    assert board.leave(NOTICE)
    assert board.read() is None
