"""The Memory tab's Compare runs, in a browser: curves of the chosen runs, and memory by module and line."""

from __future__ import annotations

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_memtools import LossCurves, MemoryMonitor, VirtualDevice
from lightning_memtools.cli.main import main
from tests.browser import chromium, open_page, wait_until
from tests.lightning_models import Wider, loader, trainer


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The tab of three runs, of which two have the snapshot of a step, as one file."""
    logs = tmp_path_factory.mktemp("logs")
    for name, width, step in (("narrow", 4096, 2), ("wide", 16384, 2), ("without", 64, None)):
        with VirtualDevice():
            board = TensorBoardLogger(logs, name="", version=name)
            run = trainer(logs, MemoryMonitor(snapshot_at_step=step), LossCurves(), logger=board)
            run.fit(Wider(width), loader())
    assert main(["report", str(logs), "-o", str(logs / "page.html")]) == 0
    return logs / "page.html"


def test_compared_runs_show_their_curves_and_the_modules_that_differ(page, tmp_path):
    with chromium() as window:
        open_page(window, page.as_uri())
        window.execute_script("document.getElementById('tab-compare').click()")
        text = "return document.querySelector('#memtools').innerText"
        assert wait_until(lambda: "Memory by module" in window.execute_script(text))
        titles = window.execute_script("return [...document.querySelectorAll('h3')].map((one) => one.textContent)")
        assert titles[0] == "Runs side by side"
        wanted = {"Memory of the chosen runs", "Loss of the chosen runs", "Memory by module at the peak of a step"}
        assert wanted <= {*titles}
        legend = "return [...document.querySelector('.legend').children].map((one) => one.innerText.trim())"
        assert [name.split("\n")[0] for name in window.execute_script(legend)] == ["narrow", "wide", "without"]
        table = """
        const sections = [...document.querySelectorAll('section')];
        const section = sections.find((one) => one.textContent.startsWith('Memory by module'));
        return [...section.querySelectorAll('tr')].map((row) => [...row.children].map((cell) => cell.innerText.trim()));
        """
        rows = window.execute_script(table)
        assert rows[0] == ["module", "narrow", "wide"]
        sizes = {row[0]: row[1:] for row in rows[1:]}
        # Weights and biases: 4 + 1 and 1 numbers of four bytes, for 4,096 and for 16,384 units.
        assert sizes["(parameters)"][1].endswith("+288 KiB")
        grown = [row[2].split("+")[-1].split() for row in rows[1:]]
        in_kib = [float(number) * {"B": 1 / 1024, "KiB": 1, "MiB": 1024}[unit] for number, unit in grown]
        assert in_kib == sorted(in_kib, reverse=True)
        window.save_screenshot(str(tmp_path / "compare.png"))

        # Without the first run, the others are compared, of which one has no snapshot.
        window.execute_script("document.querySelector('input[type=checkbox]').click()")
        assert wait_until(lambda: "two runs have a snapshot" in window.execute_script(text))
        assert [name.split("\n")[0] for name in window.execute_script(legend)] == ["wide", "without"]
