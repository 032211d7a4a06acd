from __future__ import annotations

import pytest
import torch.distributed as dist

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


def test_if_no_file_can_be_written_the_store_is_used(tmp_path):
    (tmp_path / "taken").write_text("a file")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert NoticeBoard(tmp_path / "taken", "run").read() is None
        NoticeBoard(tmp_path / "taken", "run").leave(NOTICE)
        assert NoticeBoard(tmp_path / "taken", "run").read() == NOTICE
    finally:
        dist.destroy_process_group()
