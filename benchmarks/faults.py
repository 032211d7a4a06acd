"""Runs two ranks into every fault at every moment, with and without our callbacks, and notes how each rank ended.

python faults.py [FAULT ...]

The faults are those of tests/integration/faults_run.py, of which every run of the tests takes a part: "with" are the
default callbacks, "every" the others too. Results of faults
that are not named stay in results/faults.json. A rank's exit is None where it was ended after a minute.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import RESULTS, save

from tests.integration.faults_run import FAULTS, main


def measure(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        seen = main(Path(folder), names, every=names)
    path = RESULTS / "faults.json"
    known: dict[str, Any] = json.loads(path.read_text())["faults"] if path.exists() else {}
    known |= seen
    save("faults", {"faults": {name: known[name] for name in FAULTS if name in known}})


if __name__ == "__main__":
    measure(sys.argv[1:] or [*FAULTS])
