"""Trains models that nobody here wrote with and without a plan, and compares three steps bit for bit.

Small configurations in training mode with dropout and stochastic depth on, in fp32 and bf16-mixed, on this CPU: the
losses, gradients, weights, buffers and random numbers. Each three times: in a plain loop, in one that does what the
Trainer of transformers does in a step, and with a Lightning Trainer and the callback. Beside them, the predicted and
the measured peak in the simulated allocator. Writes results/checkpointing_bitwise.json; names on the command line
measure these models only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from machine import RESULTS, save

sys.path.insert(0, str(Path(__file__).parents[1]))
# On some processors MKL's sums depend on where memory lies. MKL reads this when it is first called.
os.environ["MKL_CBWR"] = "COMPATIBLE"

from lightning_memtools.checkpointing.planning import plan_checkpoints
from tests.checkpointing.foreign_models import (
    FOREIGN,
    MORE,
    made,
    measured_peak,
    three_steps_as_of_transformers,
    trains_the_same,
    trains_the_same_in_lightning,
)


def compared(name: str) -> dict[str, Any]:
    model, batch = made(name)
    begin = time.process_time()
    plan = plan_checkpoints(model, batch, bn_dropout="recompute")
    found: dict[str, Any] = {
        "planning_processor_seconds": round(time.process_time() - begin, 2),
        "refused": plan.refused,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "extra_operations": plan.extra_operations,
    }
    if plan.refused is None:
        found["measured_peak_bytes"] = measured_peak(model, batch, plan)
        found["keeps_products"] = any(one.kept for chain in plan.chains for one in chain.ranges)
        for precision, bf16 in (("fp32", False), ("bf16", True)):
            found[f"{precision}_differs"] = trains_the_same(name, plan, bf16=bf16)
            found[f"{precision}_differs_as_of_transformers"] = trains_the_same(
                name, plan, bf16=bf16, steps=three_steps_as_of_transformers
            )
            found[f"{precision}_differs_in_lightning"] = trains_the_same_in_lightning(name, bf16=bf16)
    return found


def main() -> None:
    """Measure the models named on the command line, or all; the others keep what the file has of them."""
    file = RESULTS / "checkpointing_bitwise.json"
    for name in sys.argv[1:] or [*FOREIGN, *MORE]:
        one = compared(name)
        print(name, one, flush=True)
        known = json.loads(file.read_text())["models"] if file.exists() else {}
        save("checkpointing_bitwise", {"models": known | {name: one}})


if __name__ == "__main__":
    main()
