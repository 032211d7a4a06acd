"""Run as a program: a rank of a dry run, whose other ranks are pretended, runs out of memory and goes on.

python tests/integration/recovery_on_a_pretended_rank.py <folder>
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from lightning_memtools import OOMRecovery
from lightning_memtools._torch import pretended_ranks
from tests.integration.recovery_on_ranks import WHOLE, Failures, Net, batches, compared, fit


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    with pretended_ranks(1, 2):
        folder, data = Path(sys.argv[1]), batches(1)
        healthy = Net({})
        fit(folder, healthy, data)
        failing: list[Failures] = [{(1, 2): (1, WHOLE)}, {(1, 0): ("forward", WHOLE)}]
        for failures in failing:
            model, recovery = Net(failures), OOMRecovery(loss="mean")
            fit(folder, model, data, recovery)
            assert recovery.recoveries.n_recovered == 1
            assert model.seen.count(4) > 2  # in two parts
            assert compared(model, healthy) < 1e-7


if __name__ == "__main__":
    main()
