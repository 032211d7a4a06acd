"""Event files, read by the Memory tab: every point, as they grow, and when they are damaged."""

from __future__ import annotations

import os
import random
import struct

import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from torch.utils.tensorboard import SummaryWriter

from lightning_memtools.tensorboard_plugin import event_files
from lightning_memtools.tensorboard_plugin.event_files import Curve, EventDirectory
from lightning_memtools.tensorboard_plugin.record_checksums import first_damaged, masked_crc
from tests.event_files import scalars
from tests.tensorboard_plugin.logdirs import write_small_run


def read(log_dir):
    directory = EventDirectory(log_dir)
    directory.refresh()
    return directory.runs()


def test_every_point_is_read_as_tensorboard_reads_it(tmp_path):
    write_small_run(tmp_path / "run", text="a report")
    (run,) = read(tmp_path).values()
    ours = {tag: list(zip(curve.steps, curve.values, strict=True)) for tag, curve in run.curves.items()}
    assert ours == scalars(tmp_path / "run")
    (text,) = run.texts
    assert (text.tag, text.step, text.text) == ("memtools/memory_summary", 9, "a report")


def test_tags_of_others_are_left_out(tmp_path):
    with SummaryWriter(str(tmp_path / "other")) as writer:
        writer.add_scalar("accuracy", 1.0, 0)
    assert read(tmp_path) == {}


def test_a_short_look_finds_out_if_there_is_anything_to_show(tmp_path):
    directory = EventDirectory(tmp_path)
    assert not directory.starts_with_points()
    (tmp_path / "events.out.tfevents.0").write_bytes(os.urandom(5000))
    with SummaryWriter(str(tmp_path / "other")) as writer:
        writer.add_scalar("accuracy", 1.0, 0)
    assert not directory.starts_with_points()
    write_small_run(tmp_path / "run")
    assert directory.starts_with_points()
    assert directory.runs() == {}  # nothing was kept: the whole is read later


@pytest.mark.parametrize(("prefix", "new_style"), [("mine-", False), ("", True)])
def test_a_logger_s_prefix_is_taken_off_and_new_style_scalars_are_numbers_too(prefix, new_style, tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar(f"{prefix}loss/train", 0.25, 3, new_style=new_style)
    curves = read(tmp_path)["."].curves
    assert {tag: list(curve.values) for tag, curve in curves.items()} == {"loss/train": [0.25]}


def test_what_is_written_later_is_read_later(tmp_path):
    directory = EventDirectory(tmp_path)
    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_scalar("loss/train", 1.0, 0)
        writer.flush()
        directory.refresh()
        assert list(directory.runs()["run"].curves["loss/train"].steps) == [0]
        writer.add_scalar("loss/train", 0.5, 1)
        writer.flush()
        directory.refresh()
    assert list(directory.runs()["run"].curves["loss/train"].steps) == [0, 1]


def test_a_record_that_is_half_written_is_read_once_it_is_whole(tmp_path):
    write_small_run(tmp_path / "whole")
    (source,) = (tmp_path / "whole").iterdir()
    content = source.read_bytes()
    growing = tmp_path / "growing" / source.name
    growing.parent.mkdir()
    growing.write_bytes(content[:-20])
    directory = EventDirectory(growing.parent)
    directory.refresh()
    assert "loss/val" not in directory.runs()["."].curves
    growing.write_bytes(content)
    directory.refresh()
    run = directory.runs()["."]
    assert list(run.curves["loss/val"].values) == pytest.approx([0.7])
    assert run.notes == []


def test_a_damaged_file_is_named_and_what_comes_before_is_kept(tmp_path):
    write_small_run(tmp_path / "run")
    (file,) = (tmp_path / "run").iterdir()
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle:] = os.urandom(len(content) - middle)
    file.write_bytes(content)
    (run,) = read(tmp_path).values()
    assert 0 < len(run.curves["loss/train"].steps) < 10
    (note,) = run.notes
    assert file.name in note
    assert "damaged" in note


def test_one_flipped_bit_ends_the_reading_before_its_record(tmp_path):
    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step in range(20):
            writer.add_scalar("loss/train", 0.5, step)
    (file,) = (tmp_path / "run").iterdir()
    content = bytearray(file.read_bytes())
    value, at = struct.pack("<f", 0.5), 0
    for _ in range(13):  # the loss of step 12
        at = content.index(value, at + 1)
    content[at + 3] ^= 0x40
    file.write_bytes(content)
    (run,) = read(tmp_path).values()
    assert list(run.curves["loss/train"].values) == [0.5] * 12
    (note,) = run.notes
    assert "damaged" in note


def test_checksums_are_those_of_tensorboard():
    data, spans = b"", []
    generator = random.Random(0)  # noqa: S311, no secret
    for length in (0, 1, 50, 50, 51, 3000, 50):
        record = generator.randbytes(length)
        assert masked_crc(record) == masked_crc32c(record)
        spans.append((len(data), len(data) + length))
        data += record + struct.pack("<I", masked_crc32c(record))
    assert first_damaged(data, spans) is None
    for index, (start, stop) in enumerate(spans[1:], start=1):
        changed = bytearray(data)
        changed[(start + stop) // 2] ^= 1
        assert first_damaged(bytes(changed), spans) == index


def test_pipes_garbage_empty_files_and_loops_of_links_do_no_harm(tmp_path):
    write_small_run(tmp_path / "good")
    os.mkfifo(tmp_path / "good" / "events.out.tfevents.pipe")
    (tmp_path / "good" / "loop").symlink_to(tmp_path, target_is_directory=True)
    for name, content in (("bad", os.urandom(5000)), ("empty", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1").write_bytes(content)
    assert list(read(tmp_path)) == ["good"]


def test_points_of_an_abandoned_continuation_are_dropped():
    curve = Curve()
    for step in (0, 1, 2, 3, 2, 3, 4):
        curve.add(step, 0.0, float(len(curve.values)))
    assert list(curve.steps) == [0, 1, 2, 3, 4]


def test_a_huge_curve_is_thinned_and_keeps_its_peak(monkeypatch):
    monkeypatch.setattr(event_files, "MAX_POINTS", 100)
    curve = Curve()
    for step in range(1000):
        curve.add(step, 0.0, 9.0 if step == 333 else 1.0)
    assert len(curve.steps) <= 100
    assert curve.thinned
    assert (333, 9.0) in zip(curve.steps, curve.values, strict=True)
