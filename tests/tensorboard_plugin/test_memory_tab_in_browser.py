"""The Memory tab in a real browser, over a real TensorBoard server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys
from torch.utils.tensorboard import SummaryWriter

from tests.browser import MEMORY_TAB, chromium, enter_memory_tab, get, open_memory_tab, tensorboard, wait_until
from tests.tensorboard_plugin.logdirs import (
    ATTACK,
    write_cpu_run,
    write_failed_run,
    write_halted_run,
    write_long_run,
    write_small_run,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    logs = tmp_path_factory.mktemp("browser") / "logs"
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--logs", str(logs), "--epochs", "2"]
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, cwd=ROOT)
    write_long_run(logs / "long")
    write_small_run(
        logs / "run <script>window.attacked=1<", text=f"### Title {ATTACK}\n\n| {ATTACK} | b |\n|---|---|\n| 1 | 2 |"
    )
    write_cpu_run(logs / "cpu")
    for name in ("one", "other"):
        write_small_run(logs / name)
    write_failed_run(logs / "failed")
    write_halted_run(logs / "halted")
    return logs


@pytest.fixture(scope="module")
def board(log_dir, tmp_path_factory):
    with tensorboard(log_dir, tmp_path_factory.mktemp("server") / "output") as address:
        get(address, "plugin/lightning_memtools/runs")  # all is read
        yield address


@pytest.fixture(scope="module")
def window():
    with chromium() as opened:
        yield opened


def text_of(window, css="#memtools"):
    return window.execute_script("return document.querySelector(arguments[0]).innerText", css)


def inked(window, chart, colour, opacity=(200, 255)):
    """How many pixels of the n-th chart have a colour, given as red, green and blue, and an opacity."""
    script = """
    const canvas = document.querySelectorAll('#memtools canvas')[arguments[0]];
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let found = 0;
    for (let i = 0; i < data.length; i += 4)
        if (data[i + 3] >= arguments[2][0] && data[i + 3] <= arguments[2][1]
            && [0, 1, 2].every((k) => Math.abs(data[i + k] - arguments[1][k]) < 12)) found += 1;
    return found;
    """
    return window.execute_script(script, chart, colour, opacity)


def column_tops(window, colour):
    """For each column of the first chart, the topmost pixel of a colour as a share of the chart's height."""
    script = """
    const canvas = document.querySelector('#memtools canvas');
    const { width, height } = canvas;
    const data = canvas.getContext('2d').getImageData(0, 0, width, height).data;
    const tops = [];
    for (let x = 0; x < width; x += 1) {
        let top = null;
        for (let y = 0; y < height && top === null; y += 1) {
            const i = 4 * (y * width + x);
            const near = [0, 1, 2].every((k) => Math.abs(data[i + k] - arguments[0][k]) < 40);
            if (data[i + 3] > 200 && near) top = y / height;
        }
        tops.push(top);
    }
    return tops;
    """
    return window.execute_script(script, colour)


ALLOCATED = [0, 114, 178]
RESERVED = [230, 159, 0]
VALIDATION = [0, 158, 115]
SHADED = (48, 64)


def test_the_example_s_run_is_drawn(window, board, tmp_path):
    open_memory_tab(window, board, "lightning_logs/version_0")
    window.save_screenshot(str(tmp_path / "memory_tab.png"))
    text = text_of(window)
    for words in ("Peak allocated", "Peak reserved", "Left on the device", "validation peak", "capacity", "MiB",
                  "Loss", "Step time", "Host memory", "this process", "used by everyone"):  # fmt: skip
        assert words in text
    assert inked(window, 0, ALLOCATED) > 500
    assert inked(window, 0, RESERVED) > 500
    for chart in (0, 1):  # memory and losses
        assert inked(window, chart, VALIDATION, SHADED) > 200
    assert "retries" not in text  # constant zeros are folded away
    assert "loader workers" not in text  # there are none


def test_what_is_sent_does_not_grow_with_a_run_of_50000_steps(window, board):
    open_memory_tab(window, board, "long")
    script = "return performance.getEntriesByType('resource').map((one) => [one.name, one.decodedBodySize])"
    sent = {name.partition("?")[0].rpartition("/")[2]: size for name, size in window.execute_script(script)}
    assert 0 < sent["runs"] < 10_000
    assert 0 < sent["run"] < 3_000_000
    drawn = re.search(r"([\d,]+) points are drawn as ([\d,]+)", text_of(window))
    every, shown = (int(number.replace(",", "")) for number in drawn.groups())
    assert every >= 100_000  # two groups of curves with common steps
    assert shown <= 2 * 2 * 10_000 + 2


def test_a_run_of_a_single_point_is_drawn_and_says_that_memory_ran_out(window, board):
    open_memory_tab(window, board, "failed")
    assert inked(window, 0, ALLOCATED) > 500
    assert inked(window, 0, [193, 18, 31]) > 15  # the head of the mark; its thin line is blurred
    assert "1 out-of-memory error." in window.execute_script("return document.querySelector('.events').textContent")
    assert "1 out-of-memory error" in text_of(window, ".figures")
    open_memory_tab(window, board, "failed", "composition")
    assert inked(window, 0, [0, 158, 115]) > 5000  # activations
    rows = window.execute_script(
        "return [...document.querySelectorAll('.beside tbody tr')].map((row) => row.innerText)"
    )
    assert [row.split() for row in rows] == [
        ["parameters", "1.00", "GiB", "29%", "1.00", "GiB", "29%"],
        ["activations", "2.50", "GiB", "71%", "2.50", "GiB", "71%"],
        ["total", "3.50", "GiB", "100%", "3.50", "GiB", "100%"],
    ]
    open_memory_tab(window, board, "failed", "reports")
    window.execute_script("document.querySelectorAll('.report').forEach((one) => { one.open = true; })")
    assert text_of(window, "blockquote") == "No memory left."
    heads = "return [...document.querySelectorAll('.report thead')].filter((one) => one.offsetHeight).length"
    assert window.execute_script(heads) == 1  # the plan's


def answers(window):
    rows = window.execute_script(
        "return [...document.querySelectorAll('.answer')].map((row) => [row.className, row.children[1].innerText])"
    )
    return [(kind.removeprefix("answer").strip(), words) for kind, words in rows]


def test_a_run_is_summed_up_in_words_before_its_charts(window, board):
    open_memory_tab(window, board, "lightning_logs/version_0")
    fits, fills, healthy = answers(window)
    assert fits[0] == "yes"
    assert "were reserved" in fits[1]
    assert fills[1].endswith("at the peak. Composition")
    assert healthy[0] == "yes"
    open_memory_tab(window, board, "cpu")
    (_, fits), (_, fills), (kind, _) = answers(window)
    assert fits.startswith("No GPU was used. This process took at most 1.90 GiB")
    assert fills.startswith("Not known without a GPU")
    assert kind == "yes"
    open_memory_tab(window, board, "run <script>window.attacked=1<")
    assert [kind for kind, _ in answers(window)] == ["yes", "", "yes"]


@pytest.mark.parametrize("width", [1280, 390])
def test_a_run_that_ended_with_an_error_says_so_on_top_and_leads_to_the_report(window, board, width):
    window.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        open_memory_tab(window, board, "failed")
        banner = window.find_element("css selector", ".ended")
        assert banner.text == "This run ended with an error. OutOfMemoryError: CUDA out of memory. Read why"
        assert banner.location["y"] < 250
        assert answers(window)[0][0] == "no"
        banner.find_element("css selector", "button").click()
        shown = "return [...document.querySelectorAll('.report')].map((one) => [one.innerText, one.open])"
        assert wait_until(lambda: len(window.execute_script(shown)) == 5)
        titles = [(text.split("\n")[0], is_open) for text, is_open in window.execute_script(shown)]
        assert titles[:2] == [("How the run ended", True), ("Out of memory", True)]
        assert not any(is_open for _, is_open in titles[2:])
    finally:
        window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_mark_is_said_when_the_cursor_is_on_it(window, board):
    open_memory_tab(window, board, "run <script>window.attacked=1<")
    plot = window.find_element("css selector", ".plot")
    plot.send_keys(*[Keys.ARROW_RIGHT] * 7)
    spoken = window.execute_script("return document.querySelector('.spoken').textContent")
    assert spoken.startswith("step 6 · 2 allocation retries")


def test_every_chart_is_drawn_and_a_leak_is_marked_in_those_of_memory_and_loss(window, board):
    open_memory_tab(window, board, "run <script>window.attacked=1<")
    charts = window.execute_script("return [...document.querySelectorAll('.chart')].map((one) => one.innerText)")
    assert [one.split("\n")[0] for one in charts] == ["Memory", "Loss", "Step time"]
    assert "wait for data" in charts[2]
    assert [inked(window, chart, [17, 24, 39]) > 15 for chart in (0, 1, 2)] == [True, True, False]
    assert ["leak found" in one for one in charts[:3]] == [True, True, False]
    assert "2 leaks were found." in window.execute_script("return document.querySelector('.events').textContent")


def test_a_run_without_curves_names_its_reports_and_is_not_compared(window, board):
    open_memory_tab(window, board, "halted", "run")
    text = text_of(window, "#view")
    assert "reports" in text
    assert "zoom" not in text
    open_memory_tab(window, board, "halted", "compare")
    heads = window.execute_script("return [...document.querySelectorAll('.compare thead th')].map((h) => h.innerText)")
    assert len(heads) == 1 + 6
    assert "halted" not in heads
    assert "halted" in text_of(window, ".choices")


def test_each_one_step_peak_of_50000_points_is_seen(window, board):
    open_memory_tab(window, board, "long")
    tops = column_tops(window, ALLOCATED)
    # The capacity is 8 GiB: the curve of 1 GiB lies at 0.8 of the height, and the peaks of 3 GiB reach 0.6.
    high = [x for x, top in enumerate(tops) if top is not None and top < 0.7]
    peaks = sum(1 for i, x in enumerate(high) if i == 0 or x - high[i - 1] > 5)
    assert peaks == 3
    assert "so no peak is lost" in text_of(window)
    assert "3.0" in text_of(window, ".figures")


def test_zooming_one_chart_zooms_the_others(window, board):
    open_memory_tab(window, board, "run <script>window.attacked=1<")
    before = [inked(window, chart, VALIDATION, SHADED) for chart in (0, 1)]
    assert min(before) > 100  # the last tenth of the steps
    for key in ("+", "+"):
        window.find_element("css selector", ".plot").send_keys(key)
    assert wait_until(lambda: [inked(window, chart, VALIDATION, SHADED) for chart in (0, 1)] == [0, 0], 15)
    window.find_element("css selector", ".plot").send_keys(Keys.ESCAPE)
    assert wait_until(lambda: [inked(window, chart, VALIDATION, SHADED) for chart in (0, 1)] == before, 15)


def test_a_run_on_a_cpu_shows_host_memory_first_and_each_loss_in_a_colour_of_its_own(window, board):
    open_memory_tab(window, board, "cpu")
    titles = window.execute_script("return [...document.querySelectorAll('.chart h3')].map((one) => one.textContent)")
    assert titles == ["Host memory", "Loss"]
    assert inked(window, 0, ALLOCATED) > 500
    keys = "return [...document.querySelectorAll('.chart')[1].querySelectorAll('.key')].map((one) => one.style.cssText)"
    colours = window.execute_script(keys)
    assert len(set(colours)) == len(colours) == 3
    for colour in (ALLOCATED, RESERVED, [213, 94, 0]):  # the losses are negative, and drawn
        assert inked(window, 1, colour) > 500
    assert f"validation/{ATTACK}" in text_of(window)


def test_the_keyboard_moves_the_cursor_and_the_values_are_spoken(window, board):
    open_memory_tab(window, board, "lightning_logs/version_0")
    plot = window.find_element("css selector", ".plot")
    plot.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)  # at the first step the cache was emptied; it has no peak
    spoken = window.execute_script("return document.querySelector('.spoken').textContent")
    assert spoken.startswith("step ")
    assert "peak allocated" in spoken
    assert "MiB" in spoken
    # The cursor of the other charts follows.
    assert window.execute_script("return [...document.querySelectorAll('.at')].every((at) => at.textContent)")
    label = plot.get_attribute("aria-label")
    assert "Memory" in label
    assert "Arrow keys" in label


def test_composition_comparison_and_reports(window, board):
    open_memory_tab(window, board, "lightning_logs/version_0", "composition")
    assert "optimizer state" in text_of(window)
    open_memory_tab(window, board, "lightning_logs/version_0", "compare")
    text = text_of(window)
    for words in (
        "peak allocated, train",
        "peak reserved, val",
        "time per step",
        "Checkpoint plan of failed",
        "activations: 5.20 MiB",
        "failed: Batch size: train 96, val 128",
    ):
        assert words in text
    assert re.search(r"[+\u2212][\d,.]+%", text)
    titles = window.execute_script("return [...document.querySelectorAll('h3')].map((one) => one.textContent)")
    assert titles[0] == "Runs side by side"
    assert {"Memory of the chosen runs", "Loss of the chosen runs"} <= {*titles}
    legend = "return [...document.querySelector('.legend').children].map((one) => one.innerText.trim().split('\\n')[0])"
    chosen = window.execute_script(legend)
    assert len(chosen) > 2
    window.execute_script("document.querySelector('input[type=checkbox]:checked').click()")
    assert wait_until(lambda: window.execute_script(legend) == chosen[1:])
    open_memory_tab(window, board, "lightning_logs/version_0", "reports")
    assert text_of(window).count("Memory summary") == 1
    closed = window.execute_script("return document.querySelector('#view').textContent")
    assert "during fit" in closed
    assert window.execute_script("return document.querySelectorAll('.report table').length") >= 2
    open_memory_tab(window, board, "failed", "reports")
    assert "call 2 of 2" in text_of(window)


def test_names_and_texts_from_the_logs_never_become_markup(window, board):
    for run in ("run <script>window.attacked=1<", "cpu"):
        for view in ("run", "composition", "compare", "reports"):
            open_memory_tab(window, board, run, view)
            assert window.execute_script("return window.attacked") is None
            found = "return document.querySelectorAll('#memtools img, #memtools script').length"
            assert window.execute_script(found) == 0
        assert ATTACK in text_of(window)


def test_the_page_is_quiet_and_asks_nobody_but_the_server(window, board):
    window.switch_to.default_content()
    window.get("about:blank")  # TensorBoard is to be loaded too
    window.get_log("browser")
    open_memory_tab(window, board, "lightning_logs/version_0")
    assert [line for line in window.get_log("browser") if line["level"] == "SEVERE"] == []
    loaded = window.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(loaded) > 8
    assert [name for name in loaded if not name.startswith(board)] == []


def test_dark_mode_follows_tensorboard(window, board):
    background = "return getComputedStyle(document.querySelector('#memtools')).backgroundColor"
    open_memory_tab(window, board, "lightning_logs/version_0")
    light = window.execute_script(background)
    open_memory_tab(window, board, "lightning_logs/version_0", dark=True)
    assert (light, window.execute_script(background)) == ("rgb(244, 246, 249)", "rgb(20, 24, 31)")


def test_a_narrow_window_needs_no_sideways_scrolling(window, board):
    window.set_window_size(500, 900)
    try:
        for run, view in (
            ("lightning_logs/version_0", "run"), ("lightning_logs/version_0", "composition"),
            ("lightning_logs/version_0", "compare"), ("lightning_logs/version_0", "reports"), ("cpu", "reports"),
        ):  # fmt: skip
            open_memory_tab(window, board, run, view)
            assert window.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (run, view)
        wide = (
            "return [...document.querySelectorAll('pre, blockquote')].map((one) => one.scrollWidth <= one.clientWidth)"
        )
        assert window.execute_script(wide) == [True, True]
    finally:
        window.set_window_size(1400, 1000)


def test_an_empty_log_directory_says_which_callback_to_add(window, tmp_path):
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        writer.add_scalar("accuracy", 1.0, 0)
    with tensorboard(tmp_path / "logs", tmp_path / "output") as address:
        get(address, "plugins_listing")
        window.switch_to.default_content()
        window.get(f"{address}/{MEMORY_TAB}")
        assert wait_until(lambda: enter_memory_tab(window))
        assert "default_callbacks()" in text_of(window)
