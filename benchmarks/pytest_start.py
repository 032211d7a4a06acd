"""What pytest's plugin costs where no test has a budget: the start of pytest with it and without it, in turn.

python benchmarks/pytest_start.py
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from machine import interleaved, save, spread

RUNS = 25
WITHOUT = ("-p", "no:lightning_memtools")


def processor_ms(folder: str, *options: str) -> float:
    """Return the processor time of a run of pytest on one empty test."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_empty.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    """Measure both, and a second time the runs without it, which shows the noise."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_empty.py").write_text("def test_empty(): pass\n")
        processor_ms(folder)
        cases = {
            "with": partial(processor_ms, folder),
            "without": partial(processor_ms, folder, *WITHOUT),
            "without, again": partial(processor_ms, folder, *WITHOUT),
        }
        samples = interleaved(cases, RUNS)
    middle = {name: statistics.median(one) for name, one in samples.items()}
    save(
        "pytest_start",
        {
            "processor_ms": {name: spread(one) for name, one in samples.items()},
            "with over without": round(middle["with"] / middle["without"], 3),
            "without again over without": round(middle["without, again"] / middle["without"], 3),
        },
    )


if __name__ == "__main__":
    main()
