"""`memtools report`."""

from __future__ import annotations

import re

import pytest

from lightning_memtools.cli.main import main
from tests.browser import chromium, open_page, wait_until
from tests.tensorboard_plugin.logdirs import ATTACK, write_failed_run, write_small_run


def test_the_file_shows_the_curves_without_a_server(tmp_path, capsys):
    write_failed_run(tmp_path / "logs" / "failed")
    write_small_run(tmp_path / "logs" / "run </script><script>window.attacked=1", text=ATTACK)
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "logs"), "-o", str(output)]) == 0
    assert str(output) in capsys.readouterr().out
    page = output.read_text()
    # Nothing is loaded: the only addresses are a comment's and namespaces'.
    assert re.findall(r'(?:src|href)="', page) == []
    with chromium() as window:
        open_page(window, output.as_uri())
        text = window.execute_script("return document.querySelector('#memtools').innerText")
        assert "Peak allocated" in text
        assert "1.90 GiB" in text
        assert window.execute_script("return document.querySelectorAll('#memtools canvas').length") == 3
        window.execute_script("document.getElementById('tab-reports').click()")
        reports = "return document.querySelector('#view').innerText"
        assert wait_until(lambda: ATTACK in window.execute_script(reports), 10)
        assert window.execute_script("return window.attacked") is None
        window.execute_script("document.getElementById('tab-compare').click()")
        assert wait_until(lambda: "peak allocated, val" in window.execute_script(reports), 10)
        window.execute_script("document.getElementById('tab-composition').click()")
        assert wait_until(lambda: "not known for this run" in window.execute_script(reports), 10)
        window.execute_script(
            "const s = document.querySelector('select'); s.value = 'failed'; s.dispatchEvent(new Event('change'))"
        )
        assert wait_until(lambda: "Composition at the peak" in window.execute_script(reports), 10)
        assert [line for line in window.get_log("browser") if line["level"] == "SEVERE"] == []


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_nothing_to_show_is_an_error_with_the_next_step(kind, tmp_path, capsys):
    directory = tmp_path / "logs"
    if kind == "empty":
        directory.mkdir()
    assert main(["report", str(directory), "-o", str(tmp_path / "x.html")]) == 1
    error = capsys.readouterr().err
    assert str(directory) in error
    assert not (tmp_path / "x.html").exists()


def test_an_output_that_cannot_be_written_is_named(tmp_path, capsys):
    write_small_run(tmp_path / "logs")
    assert main(["report", str(tmp_path / "logs"), "-o", str(tmp_path / "no" / "x.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err
