"""A real TensorBoard server and a real headless Chromium."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

MEMORY_TAB = "#lightning_memtools"


@contextlib.contextmanager
def tensorboard(log_dir: Path, output: Path, *options: str) -> Iterator[str]:
    """The address of a server over `log_dir`, on a free loopback port; ended by its process id."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(log_dir), "--port", "0", "--host", "127.0.0.1"]
    command += options
    with output.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as server:
        try:
            yield _address(server, output)
        finally:
            server.terminate()


def _address(server: subprocess.Popen[bytes], output: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+", output.read_text())
        if found:
            return found[0]
        time.sleep(0.1)
    raise TimeoutError(f"TensorBoard did not start: {output.read_text()}")


def get(address: str, path: str, **query: str) -> Any:
    """A JSON answer of the server, asked again for a while as long as it is empty: it loads in the background."""
    url = f"{address}/data/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(url) as answer:  # noqa: S310, our own server on the loopback
            content = json.load(answer)
        if content or time.monotonic() > deadline:
            return content
        time.sleep(0.5)


@contextlib.contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A headless browser; the test is skipped where none is installed."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1000",
    ):  # fmt: skip
        options.add_argument(argument)
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield window
    finally:
        window.quit()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def open_page(window: webdriver.Chrome, address: str) -> None:
    """Load a page of ours, and wait until it is drawn."""
    window.get(address)
    ready = "return document.documentElement.dataset.ready === 'true'"
    assert wait_until(lambda: bool(window.execute_script(ready))), window.get_log("browser")


def open_memory_tab(
    window: webdriver.Chrome, address: str, run: str | None = None, view: str | None = None, *, dark: bool = False
) -> None:
    """Load the Memory tab, with a run and a view chosen; the window is then inside of its frame.

    Where the window shows this TensorBoard already, its frame is loaded again and not TensorBoard itself, which takes
    ten times as long.
    """
    page = f"{address}/{'?darkMode=true' if dark else ''}{MEMORY_TAB}"
    window.switch_to.default_content()
    if window.current_url == page and enter_memory_tab(window):
        window.execute_script("delete document.documentElement.dataset.ready")
        window.switch_to.default_content()
        window.execute_script("const frame = document.querySelector('iframe'); frame.src = frame.src")
    else:
        window.get("about:blank")
        window.get(page)
    assert wait_until(lambda: enter_memory_tab(window)), "the tab did not load"
    window.execute_script("""
        const ask = window.fetch;
        window.asked = 0;
        window.fetch = (...what) => {
            window.asked += 1;
            const answer = ask(...what);
            answer.then((given) => given.clone().text()).finally(() => setTimeout(() => { window.asked -= 1; }));
            return answer;
        };
    """)
    if run is not None:
        script = (
            "const s = document.querySelector('select'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
        )
        window.execute_script(script, run)
        _wait_until_drawn(window)
    if view is not None:
        window.execute_script("document.getElementById(`tab-${arguments[0]}`).click()", view)
    _wait_until_drawn(window)


def _wait_until_drawn(window: webdriver.Chrome) -> None:
    """Wait until every answer of the server has arrived, and for the frame after the next, in which it is drawn."""
    window.execute_async_script("""
        const done = arguments[0];
        const look = () => window.asked === 0 && document.querySelector('#view').children.length > 0
            ? requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))) : setTimeout(look, 20);
        setTimeout(look, 20);
    """)


def enter_memory_tab(window: webdriver.Chrome) -> bool:
    """Go into the tab's frame; True once it has drawn itself."""
    window.switch_to.default_content()
    frames = window.find_elements("tag name", "iframe")
    if not frames:
        return False
    window.switch_to.frame(frames[0])
    return bool(window.execute_script("return document.documentElement.dataset.ready") == "true")
