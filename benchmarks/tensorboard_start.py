"""How long TensorBoard takes to start with the Memory tab and without it, with the fast loader and without.

Each run starts a server over a log directory of a small and a long run (50,000 points), and waits until it listens, and
then until it has answered which tabs are active. Runs with and without the tab take turns; the ratio is what counts.

    python benchmarks/tensorboard_start.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from machine import interleaved, save, spread

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.tensorboard_plugin.logdirs import write_long_run, write_small_run

REPEATS = 5
WITHOUT = (
    "from tensorboard import default, main; every = default._iter_entry_points; "
    "default._iter_entry_points = lambda group: [p for p in every(group) if p.name != 'lightning_memtools']; "
    "main.run_main()"
)
WITH = "from tensorboard import main; main.run_main()"


def seconds(log_dir: Path, code: str, load_fast: str) -> tuple[float, float]:
    """Seconds until the server listens, and until it has listed its tabs."""
    command = [sys.executable, "-c", code, "--logdir", str(log_dir), "--port", "0", "--host", "127.0.0.1",
               f"--load_fast={load_fast}"]  # fmt: skip
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            listening = time.perf_counter() - began
            url = f"{address}/data/plugins_listing"
            with urllib.request.urlopen(url) as answer:  # noqa: S310, our own server on the loopback
                has_tab = b"lightning_memtools" in answer.read()
            assert has_tab == (code is WITH), "install the package first, so that TensorBoard finds its entry point"
            return listening, time.perf_counter() - began
        finally:
            server.terminate()


def main() -> None:
    """Measure, and write the results."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        log_dir = Path(folder)
        write_small_run(log_dir / "small")
        write_long_run(log_dir / "long")
        for load_fast in ("true", "false"):
            tabs: dict[str, list[float]] = {"with": [], "without": []}

            def start(name: str, code: str, load_fast: str, tabs: dict[str, list[float]]) -> float:
                listening, listed = seconds(log_dir, code, load_fast)
                tabs[name].append(listed)
                return listening

            cases: dict[str, Callable[[], float]] = {
                "with": partial(start, "with", WITH, load_fast, tabs),
                "without": partial(start, "without", WITHOUT, load_fast, tabs),
            }
            samples = interleaved(cases, REPEATS)
            found[f"load_fast={load_fast}"] = {
                "ratio until it listens": spread(samples["with"])["median"] / spread(samples["without"])["median"],
                "ratio until the tabs are listed": spread(tabs["with"])["median"] / spread(tabs["without"])["median"],
                "seconds until it listens": {name: spread(values) for name, values in samples.items()},
                "seconds until the tabs are listed": {name: spread(values) for name, values in tabs.items()},
            }
    save("tensorboard_start", {"load average of the last minute": os.getloadavg()[0], **found})


if __name__ == "__main__":
    main()
