"""Event files, read by the Memory tab: every point, as they grow, and when they are damaged."""

from __future__ import annotations

import os

import pytest
from torch.utils.tensorboard import SummaryWriter

from lightning_memtools.tensorboard_plugin.event_files import Curve, EventDirectory
from tests.event_files import scalars
from tests.tensorboard_plugin.logdirs import write_small_run


def read(log_dir):
    return EventDirectory(log_dir).read()


def test_points_and_reports_are_read(tmp_path):
    write_small_run(tmp_path / "run", text="a report")
    (run,) = read(tmp_path).values()
    ours = {tag: list(zip(curve.steps, curve.values, strict=True)) for tag, curve in run.curves.items()}
    assert ours == scalars(tmp_path / "run")
    (text,) = run.texts
    assert (text.tag, text.step, text.text) == ("memtools/memory_summary", 9, "a report")


def test_what_is_written_later_is_read_later_without_the_logger_s_prefix(tmp_path):
    directory = EventDirectory(tmp_path)
    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_scalar("mine-loss/train", 1.0, 7)
        writer.flush()
        assert list(directory.read()["run"].curves["loss/train"].steps) == [7]
        writer.add_scalar("mine-loss/train", 0.5, 8)
        writer.flush()
        assert list(directory.read()["run"].curves["loss/train"].steps) == [7, 8]
    write_small_run(tmp_path / "again")  # the same run, from its beginning
    (first,), (second,) = ((tmp_path / name).iterdir() for name in ("run", "again"))
    first.unlink()
    second.rename(first.with_name(f"{first.name}.again"))  # files of one second are not always in order by name
    assert list(directory.read()["run"].curves["loss/train"].steps) == list(range(10))


def test_a_record_that_is_half_written_is_read_once_it_is_whole(tmp_path):
    write_small_run(tmp_path / "whole")
    (source,) = (tmp_path / "whole").iterdir()
    content = source.read_bytes()
    growing = tmp_path / "growing" / source.name
    growing.parent.mkdir()
    growing.write_bytes(content[:-20])
    directory = EventDirectory(growing.parent)
    runs = directory.read()
    assert "loss/val" not in runs["."].curves
    growing.write_bytes(content)
    runs = directory.read()
    run = runs["."]
    assert list(run.curves["loss/val"].values) == pytest.approx([0.7])
    assert run.notes == []


def test_of_a_damaged_file_what_comes_before_is_kept_and_others_are_read(tmp_path):
    for name in ("damaged", "good"):
        write_small_run(tmp_path / name)
    (file,) = (tmp_path / "damaged").iterdir()
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle:] = os.urandom(len(content) - middle)
    file.write_bytes(content)
    runs = read(tmp_path)
    assert 0 < len(runs["damaged"].curves["loss/train"].steps) < 10
    assert len(runs["good"].curves["loss/train"].steps) == 10


def test_garbage_and_empty_files_do_no_harm(tmp_path):
    write_small_run(tmp_path / "good")
    for name, content in (("bad", os.urandom(5000)), ("empty", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1").write_bytes(content)
    assert list(read(tmp_path)) == ["good"]


def test_points_of_an_abandoned_continuation_are_dropped():
    curve = Curve()
    for step in (0, 1, 2, 3, 2, 3, 4):
        curve.add(step, 0.0, float(len(curve.values)))
    assert list(curve.steps) == [0, 1, 2, 3, 4]
