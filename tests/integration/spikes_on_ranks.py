"""Run as a program, once per rank: rank 1 alone has a bad batch, and LossSpikes acts on it. Writes what each rank saw.

LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... python tests/integration/spikes_on_ranks.py <folder>
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from lightning_memtools import HaltOnNaN, LossSpikeError, LossSpikes
from tests.callbacks.spike_models import AT, Spiking, as_loader, batches, labels_times
from tests.integration.halt_on_ranks import digest
from tests.lightning_models import trainer

ACTIONS = ("report", "skip", "rollback", "halt")


def run(action: Any, folder: Path, rank: int) -> dict[str, Any]:
    """Train on two ranks and return what this one saw."""
    torch.manual_seed(0)
    model = Spiking()
    made = [labels_times(30 if rank and index == AT else 1)(batch) for index, batch in enumerate(batches())]
    options = {"action": "skip", "max_actions": 0} if action == "halt" else {"action": action, "every_n_steps": 20}
    spikes: Any = LossSpikes(**options, directory=str(folder / action))
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    run = trainer(folder, HaltOnNaN(), spikes, logger=False, **options)
    error = ""
    try:
        run.fit(model, as_loader(made))
    except LossSpikeError as raised:
        error = str(raised)
    return {
        "error": error,
        "spikes": [(one.step, one.done, one.loss, one.norm, one.taken_back) for one in spikes.spikes],
        "global_step": run.global_step,
        "digest": digest(model),
    }


def main() -> None:
    """Run every action."""
    warnings.filterwarnings("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)
    seen = {action: run(action, folder, rank) for action in ACTIONS}
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
