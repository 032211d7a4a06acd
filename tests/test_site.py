"""The manual's site in a real browser: every page at the width of a desk and of a telephone."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from selenium import webdriver

from tests.browser import chromium, wait_until

ROOT = Path(__file__).parents[1]
WIDTHS = {1280: 800, 390: 844}
SMALLEST_TEXT = 11


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and writes no line for each request."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built once and strictly."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def window() -> Iterator[webdriver.Chrome]:
    with chromium() as opened:
        yield opened


def pages() -> list[str]:
    """The path of every page of the manual."""
    names = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"design", "index"}
    return ["", *(f"{name}/" for name in sorted(names))]


# Returns what a reader would complain of.
SCRIPT = """
const wrong = [], wide = innerWidth >= 1000, root = document.documentElement;
if (root.scrollWidth > innerWidth) wrong.push(`the page is ${root.scrollWidth} wide`);
for (const table of document.querySelectorAll('article table')) {
    const frame = table.closest('.md-typeset__scrollwrap') || table.parentElement;
    const scrolls = ['auto', 'scroll'].includes(getComputedStyle(frame).overflowX);
    const first = table.textContent.trim().slice(0, 40);
    if (frame.scrollWidth > frame.clientWidth + 1 && (wide || !scrolls)) wrong.push(`a table is cut off: ${first}`);
}
for (const code of document.querySelectorAll('article pre > code'))
    if (wide && code.scrollWidth > code.clientWidth) wrong.push(`cut off: ${code.textContent.slice(0, 60)}`);
for (const picture of document.querySelectorAll('article img')) {
    if (!picture.complete || !picture.naturalWidth) wrong.push(`${picture.src} is missing`);
    if (picture.getBoundingClientRect().right > innerWidth + 1) wrong.push(`${picture.src} is cut off`);
}
for (const element of document.querySelectorAll('article p, article td, article li'))
    if (parseFloat(getComputedStyle(element).fontSize) < arguments[0])
        wrong.push(`small text: ${element.textContent.slice(0, 40)}`);
if (document.querySelectorAll('article h1').length !== 1) wrong.push('a page has one title');
return wrong;
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways_and_nothing_is_cut_off(site, window, width):
    sizes = {"width": width, "height": WIDTHS[width], "deviceScaleFactor": 1, "mobile": False}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)  # a window cannot be as narrow as a telephone
    window.get_log("browser")
    wrong = {}
    for page in pages():
        window.get(f"{site}/{page}")
        assert wait_until(lambda: window.execute_script("return document.readyState") == "complete")
        assert window.execute_script("return innerWidth") == width
        said = [line["message"] for line in window.get_log("browser") if line["level"] in {"SEVERE", "WARNING"}]
        if found := window.execute_script(SCRIPT, SMALLEST_TEXT) + said:
            wrong[page] = found
    assert wrong == {}


def test_the_search_finds_a_callback(site, window):
    window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    window.get(f"{site}/")
    window.find_element("css selector", ".md-search__input").send_keys("EmptyCache")
    titles = "return [...document.querySelectorAll('.md-search-result__article h1')].map((one) => one.textContent)"
    assert wait_until(lambda: "EmptyCache" in window.execute_script(titles))


def test_no_page_asks_another_server(site, window):
    window.get(f"{site}/memory-monitor/")
    loaded = window.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(loaded) > 3
    assert [name for name in loaded if not name.startswith(site)] == []
