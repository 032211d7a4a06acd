"""Run as a program, once per rank: one rank of two runs out of memory, and goes on. Writes what each rank saw as JSON.

LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... python tests/integration/recovery_on_ranks.py <folder> <scenario> ...
The scenario "pretended", by itself, is a rank of a dry run.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import OOMRecovery, OOMReport, default_callbacks
from lightning_memtools._torch import pretended_ranks
from tests.integration.halt_on_ranks import digest
from tests.lightning_models import trainer

WIDTH, LAYERS, SAMPLES = 400, 5, 8
"""A layer's gradients take 0.6 MiB: several buckets, from the first step on."""

# Where memory runs out: (rank, batch) to "forward" or the layer in whose backward pass it does, and for which sizes.
Failures = dict[tuple[int, int], tuple[str | int, tuple[int, ...]]]
WHOLE = (SAMPLES,)


class RunsOut(torch.autograd.Function):
    """The identity; memory runs out in its backward pass if told so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, runs_out: bool) -> Tensor:
        ctx.runs_out = runs_out
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.runs_out:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return gradients[0], None


class Net(L.LightningModule):
    """Linear layers, a buffer that every step writes, and values that ranks may exchange."""

    count: Tensor

    def __init__(self, failures: Failures, *, sync_dist: bool = False, on_step: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("count", torch.zeros(()))
        self.failures, self.sync_dist, self.on_step = failures, sync_dist, on_step
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(len(batch))
        place, sizes = self.failures.get((self.global_rank, batch_idx), ("", ()))
        fails = len(batch) in sizes
        # The part that is the last one of its batch.
        if place == "last":
            fails = fails and bool((batch[-1] == self.last_sample[batch_idx]).all())
            place = 1
        self.count += len(batch)
        x = batch
        for index, layer in enumerate(self.layers):
            x = RunsOut.apply(torch.tanh(layer(x)), fails and place == index)
        if fails and place == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        loss: Tensor = (x - batch).square().mean()
        self.log("loss", loss, sync_dist=self.sync_dist, on_step=self.on_step, on_epoch=not self.on_step)
        return loss

    last_sample: list[Tensor]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def ddp(**options: Any) -> DDPStrategy:
    return DDPStrategy(bucket_cap_mb=0.7, **options)


Scenario = tuple[Failures, dict[str, Any], Callable[[], dict[str, Any]]]
SCENARIOS: dict[str, Scenario] = {
    "forward": ({(1, 2): ("forward", WHOLE)}, {}, dict),
    **{f"backward_of_layer_{layer}": ({(1, 2): (layer, WHOLE)}, {}, dict) for layer in range(LAYERS)},
    "backward_of_the_first_step": ({(1, 0): (1, WHOLE)}, {}, dict),
    "both_ranks": ({(0, 2): ("forward", WHOLE), (1, 2): (1, WHOLE)}, {}, dict),
    "both_in_backward": ({(0, 2): (3, WHOLE), (1, 2): (0, WHOLE), (0, 3): (0, WHOLE)}, {}, dict),
    "planned_parts": ({(1, 2): ("forward", WHOLE), (1, 4): (1, (4,))}, {}, dict),
    "beside_others": ({(0, 2): (1, WHOLE)}, {}, dict),
    "last_micro_batch": ({(1, 2): ("last", (8, 4))}, {}, dict),
    "bucket_views": (
        {(1, 1): (1, WHOLE), (1, 2): ("forward", WHOLE)}, {},
        lambda: {"strategy": ddp(gradient_as_bucket_view=True)},
    ),
    "accumulation": (
        {(1, 0): (1, WHOLE), (1, 3): ("forward", WHOLE), (0, 5): ("forward", WHOLE)}, {},
        lambda: {"accumulate_grad_batches": 2},
    ),
    "accumulation_in_backward": (
        {(1, 1): (1, WHOLE), (0, 2): (2, WHOLE)}, {}, lambda: {"accumulate_grad_batches": 3}
    ),
    # As the error on the step that "talks" advises.
    "talks_when_the_epoch_ends": ({(1, 2): (1, WHOLE)}, {"sync_dist": True, "on_step": False}, dict),
    "gives_up": ({(1, 2): (1, tuple(range(9)))}, {}, dict),
    "talks": ({(1, 2): (1, WHOLE)}, {"sync_dist": True}, dict),
}  # fmt: skip

REASONS = {"gives_up": "each of its 8 samples alone", "talks": "calls the collective"}
"""Why the runs of these scenarios end."""


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(6)]


def fit(folder: Path, model: Net, data: list[Tensor], *callbacks: L.Callback, **options: Any) -> L.Trainer:
    torch.manual_seed(0)
    for layer in model.layers:
        layer.reset_parameters()  # type: ignore[operator]  # mypy sees modules
    model.last_sample = [batch[-1] for batch in data]
    defaults: dict[str, Any] = {"strategy": ddp(), "devices": 2, "logger": False, "use_distributed_sampler": False}
    run = trainer(folder, *callbacks, **(defaults | options))
    dataset: Any = data
    run.fit(model, DataLoader(dataset, batch_size=None))
    return run


def compared(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@cache
def healthy_run(name: str, folder: Path, rank: int) -> Net:
    """The model after the run of a scenario in which nothing fails."""
    _, module, options = SCENARIOS[name]
    healthy = Net({}, **module)
    fit(folder, healthy, batches(rank), **options())
    return healthy


def run(name: str, folder: Path, rank: int) -> dict[str, Any]:
    failures, module, options = SCENARIOS[name]
    is_plain = options is dict and not module
    healthy = healthy_run("forward" if is_plain else name, folder, rank)
    model, recovery = Net(failures, **module), OOMRecovery(loss="mean")
    begin = time.monotonic()
    logger = CSVLogger(folder, name=name, version="")
    others: list[L.Callback] = default_callbacks() if name == "beside_others" else []
    if name in REASONS:
        others = [OOMReport(directory=str(folder / "reports"), snapshot=False)]
    done = fit(folder, model, batches(rank), *others, recovery, **({"logger": logger} | options()))
    return {
        "scenario": name,
        "seconds": time.monotonic() - begin,
        "digest": digest(model),
        "error": compared(model, healthy),
        "moved": compared(model, Net({}, **module)),
        "count": float(model.count),
        "seen": model.seen,
        "global_step": done.global_step,
        "remark": recovery.memory_remark,
        "own_remark": str(recovery.recoveries),
    }


def run_on_a_pretended_rank(folder: Path) -> None:
    """Rank 1 of a dry run, whose other ranks are pretended, runs out of memory and goes on."""
    os.environ |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pretended_ranks(1, 2):
        healthy = healthy_run("forward", folder, 1)
        failing: list[Failures] = [{(1, 2): (1, WHOLE)}, {(1, 0): ("forward", WHOLE)}]
        for failures in failing:
            model, recovery = Net(failures), OOMRecovery(loss="mean")
            fit(folder, model, batches(1), recovery)
            assert recovery.recoveries.n_recovered == 1
            assert model.seen.count(4) > 2  # in two parts
            assert compared(model, healthy) < 1e-7


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if sys.argv[2:] == ["pretended"]:
        run_on_a_pretended_rank(folder)
        return
    seen, rank = [], int(os.environ["LOCAL_RANK"])
    for name in sys.argv[2:]:
        seen.append(run(name, folder, rank))
        (folder / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
