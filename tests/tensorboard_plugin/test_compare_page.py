"""The Memory tab's Compare runs, in a browser: curves of the chosen runs."""

from __future__ import annotations

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_memtools import LossCurves, MemoryMonitor, VirtualDevice
from lightning_memtools.cli.main import main
from tests.browser import chromium, open_page, wait_until
from tests.lightning_models import Wider, loader, trainer


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The tab of three runs, as one file."""
    logs = tmp_path_factory.mktemp("logs")
    for name, width in (("narrow", 64), ("wide", 4096), ("wider", 16384)):
        with VirtualDevice():
            board = TensorBoardLogger(logs, name="", version=name)
            run = trainer(logs, MemoryMonitor(), LossCurves(), logger=board)
            run.fit(Wider(width), loader())
    assert main(["report", str(logs), "-o", str(logs / "page.html")]) == 0
    return logs / "page.html"


def test_compared_runs_show_their_curves(page, tmp_path):
    with chromium() as window:
        open_page(window, page.as_uri())
        window.execute_script("document.getElementById('tab-compare').click()")
        text = "return document.querySelector('#memtools').innerText"
        assert wait_until(lambda: "Loss of the chosen runs" in window.execute_script(text))
        titles = window.execute_script("return [...document.querySelectorAll('h3')].map((one) => one.textContent)")
        assert titles[0] == "Runs side by side"
        wanted = {"Memory of the chosen runs", "Loss of the chosen runs"}
        assert wanted <= {*titles}
        legend = "return [...document.querySelector('.legend').children].map((one) => one.innerText.trim())"
        assert [name.split("\n")[0] for name in window.execute_script(legend)] == ["narrow", "wide", "wider"]
        window.save_screenshot(str(tmp_path / "compare.png"))

        # Without the first run, the others are compared.
        window.execute_script("document.querySelector('input[type=checkbox]').click()")
        names = ["wide", "wider"]
        assert wait_until(lambda: [one.split("\n")[0] for one in window.execute_script(legend)] == names)
