"""A run on two ranks with and without GradientCheckpointing, started by test_gradient_checkpointing.py."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_memtools import VirtualDevice
from lightning_memtools._torch import DispatchMode
from lightning_memtools.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memtools.checkpointing.planning import plan_checkpoints
from tests.checkpointing.models import encoder
from tests.lightning_models import Regression, loader, trainer


class Encoder(Regression):
    """An encoder in a Sequential, sharded where the strategy is; with a layer that takes no part when `unused`.

    Each layer is a unit of its own under FSDP 2. With `planned`, what to recompute is planned before it is sharded.
    `tokens` is the length of a sequence.
    """

    def __init__(self, *, unused: bool, planned: bool = False, tokens: int = 2) -> None:
        super().__init__()
        self.planned = planned
        width = 32 * tokens
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.Unflatten(1, (tokens, 32)), *encoder(4, 0.1), nn.Flatten(), nn.Linear(width, 1)
        )
        if unused:
            self.idle = nn.Linear(3, 3)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net, FSDPModule):
            assert self.device_mesh is not None
            if self.planned:
                # Each block as a whole: a range of several would gather all but the last of them once more.
                plan = plan_checkpoints(self.net, torch.empty(16, 4), include=["[2-5]"])
                assert plan.refused is None
                plan.apply(self.net)
            for layer in self.net.children():
                if next(layer.parameters(), None) is not None:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Gathers(DispatchMode):
    """Counts the collectives that gather parameters."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += "allgather" in str(func).replace("_", "")
        return func(*args, **(kwargs or {}))


def strategy_of(case: str) -> ModelParallelStrategy | str:
    """A new one for each run: DDP with find_unused_parameters off or on, or FSDP 2."""
    if case.startswith("fsdp2"):
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return "ddp_find_unused_parameters_true" if case == "on" else "ddp"


def main(root: Path, case: str) -> None:
    for name in ("plain", "checkpointed"):
        L.seed_everything(0, verbose=False)
        before = case == "fsdp2-planned-before"
        model = Encoder(unused=case == "on", planned=before and name == "checkpointed")
        offloads = case.endswith("offloaded")
        if offloads:
            model = Encoder(unused=False, tokens=128)  # what layers keep is large enough to be worth a copy
        callback = GradientCheckpointing(bn_dropout="recompute", offload=offloads)
        run = trainer(
            root,
            *([callback] if name == "checkpointed" and not before else []),
            strategy=strategy_of(case),
            devices=2,
            logger=False,
        )
        with Gathers() as gathers, VirtualDevice("1GiB") if offloads else nullcontext() as device:
            run.fit(model, loader(96, 16))
            peak = device.stats().peak_allocated if device is not None else None
        plan = None if callback.plan is None else callback.plan.chains
        weights = {key: one.to_local() if isinstance(one, DTensor) else one for key, one in model.state_dict().items()}
        torch.save(
            {"weights": weights, "plan": plan, "gathered": gathers.number, "peak": peak},
            root / f"{case}-{name}-{run.global_rank}.pt",
        )
        run.strategy.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
