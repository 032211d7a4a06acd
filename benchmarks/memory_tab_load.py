"""How long the Memory tab takes to show a run of 50,000 points, beside a Memory tab that is empty.

One server over a log directory with the long run, one over an empty directory, one headless Chromium. Each load starts
from a blank page, and the two pages take turns; what the empty tab takes is TensorBoard's own page.

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

from tests.browser import chromium, get, tensorboard
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
            cases = {
                "memory tab": partial(seconds, window, f"{long}/#{TAB}", is_ready),
                "empty memory tab": partial(seconds, window, f"{empty}/#{TAB}", is_ready),
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
            "seconds": {name: spread(values) | {"fastest": min(values)} for name, values in samples.items()},
            "seconds of the server's first answer, with reading the event files": first,
        },
    )


if __name__ == "__main__":
    main()
