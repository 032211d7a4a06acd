"""How long the Memory tab takes to show a run of 50,000 points, beside an empty tab and TensorBoard's own scalars.

One server over a log directory with the long run, one over an empty directory, one headless Chromium. Each load starts
from a blank page, and the three pages take turns. The scalars page counts as loaded when its first card is
there, which is before its curve is drawn; the Memory tab when all of its charts are drawn.

    python benchmarks/memory_tab_load.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from machine import interleaved, save, spread

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser import chromium, get, seen, tensorboard
from tests.tensorboard_plugin.logdirs import N_LONG, write_long_run

REPEATS = 4
TAB = "lightning_memtools"
READY = "return document.documentElement.dataset.ready === 'true'"


def is_ready(window: Any) -> bool:
    """True once the Memory tab has drawn everything."""
    window.switch_to.default_content()
    frames = window.find_elements("tag name", "iframe")
    if not frames:
        return False
    window.switch_to.frame(frames[0])
    return bool(window.execute_script(READY))


def has_scalars(window: Any) -> bool:
    """True once the scalars page shows a card: it opens the first group of tags."""
    return "loss/train" in seen(window)


def seconds(window: Any, url: str, done: Callable[[Any], bool]) -> float:
    """Seconds from asking for a page until it is done."""
    window.switch_to.default_content()
    window.get("about:blank")
    began = time.perf_counter()
    window.get(url)
    while not done(window):
        time.sleep(0.01)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_long_run(root / "logs" / "long")
        (root / "empty").mkdir()
        with (
            tensorboard(root / "logs", root / "long.out") as long,
            tensorboard(root / "empty", root / "empty.out") as empty,
            chromium() as window,
        ):
            began = time.perf_counter()
            get(long, f"plugin/{TAB}/run", run="long")
            first = time.perf_counter() - began
            get(long, "plugin/scalars/tags")
            cases = {
                "memory tab": partial(seconds, window, f"{long}/#{TAB}", is_ready),
                "empty memory tab": partial(seconds, window, f"{empty}/#{TAB}", is_ready),
                "scalars": partial(seconds, window, f"{long}/#scalars", has_scalars),
            }
            for load in cases.values():
                load()  # the browser's first page takes longer
            samples = interleaved(cases, REPEATS)
    medians = {name: spread(values)["median"] for name, values in samples.items()}
    save(
        "memory_tab_load",
        {
            "points": N_LONG,
            "cores": os.cpu_count(),
            "load average of the last minute": os.getloadavg()[0],
            "ratio to an empty memory tab": medians["memory tab"] / medians["empty memory tab"],
            "ratio to TensorBoard's scalars": medians["memory tab"] / medians["scalars"],
            "seconds": {name: spread(values) | {"fastest": min(values)} for name, values in samples.items()},
            "seconds of the server's first answer, with reading the event files": first,
        },
    )


if __name__ == "__main__":
    main()
