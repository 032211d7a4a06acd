from __future__ import annotations

from lightning_memtools.oom.oom_reporter import NoticeBoard


def test_if_no_file_can_be_written_each_rank_is_the_first(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "taken"))
    for directory in (None, tmp_path / "taken"):
        board = NoticeBoard(directory, "run")
        assert board.leave("rank 1 failed")
        assert board.read() == ""
