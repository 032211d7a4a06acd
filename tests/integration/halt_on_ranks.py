"""Run as a program, once per rank: scenarios in which one rank of two meets NaN. Writes what each rank saw as JSON.

LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... python tests/integration/halt_on_ranks.py <folder>
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite import step_guard
from lightning_memtools.nonfinite.bad_step import NonFiniteError
from tests.lightning_models import trainer

BAD = 5


class BadBackward(torch.autograd.Function):
    """The identity; its backward pass gives NaN if told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_bad: bool) -> Tensor:
        ctx.is_bad = is_bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * (torch.nan if ctx.is_bad else 1.0), None


class Net(L.LightningModule):
    """Fails on rank 1 at batch 5, in the way given."""

    def __init__(self, fails: str, *, fused: bool = False, unused: bool = False, shard: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Linear(4, 1) if unused else None
        self.fails, self.fused, self.shard = fails, fused, shard

    def configure_model(self) -> None:
        if self.shard:
            assert self.device_mesh is not None
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        is_bad = batch_idx == BAD and self.global_rank == 1
        out = self.net(batch)
        if self.fails == "backward":
            out = BadBackward.apply(out, is_bad)
        loss: Tensor = (out - batch.nan_to_num().sum(1, keepdim=True)).square().mean()
        if self.fails == "ours" and is_bad:
            vars(step_guard)["measure"] = [].pop  # it fails from now on, on this rank alone
        if self.fails == "talks":
            distributed.all_reduce(loss.detach().clone())
        if self.fails == "loss" and is_bad:
            loss = loss + torch.inf  # the gradients stay finite
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        bad = self.fails == "validation" and batch_idx == 1 and self.global_rank == 1
        loss = torch.tensor(torch.nan if bad else 0.0)
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)


def loader(rank: int, *, is_dirty: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, 4, generator=generator) for _ in range(8)]
    if is_dirty and rank == 1:
        batches[BAD][2, 1] = torch.nan
    dataset: Any = batches
    return DataLoader(dataset, batch_size=None)


def half() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**4))


def sharded() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)


# Name: how it fails, arguments of the module, of the callback, and of the Trainer (made anew in each rank).
Scenario = tuple[str, dict[str, Any], dict[str, Any], Callable[[], dict[str, Any]]]
SCENARIOS: dict[str, Scenario] = {
    "sample": ("sample", {}, {}, dict),
    "sample_fused": ("sample", {"fused": True}, {}, dict),
    "unused_parameters": (
        "sample", {"unused": True}, {}, lambda: {"strategy": DDPStrategy(find_unused_parameters=True)}
    ),
    "accumulation": ("sample", {}, {}, lambda: {"accumulate_grad_batches": 4}),
    "loss_alone": ("loss", {}, {}, dict),
    "loss_alone_fused": ("loss", {"fused": True}, {}, dict),
    "backward": ("backward", {}, {}, dict),
    "talks": ("talks", {}, {}, dict),
    "validation": ("validation", {}, {}, dict),
    "scaler": ("sample", {}, {}, lambda: {"plugins": half()}),
    "skipped": ("sample", {}, {"max_skips": 1}, dict),
    "sharded": ("sample", {"shard": True}, {}, lambda: {"strategy": sharded()}),
    "sharded_loss": ("loss", {"shard": True}, {}, lambda: {"strategy": sharded()}),
    "fails_sharded": ("ours", {"shard": True}, {}, lambda: {"strategy": sharded()}),  # the last: it breaks the guard
}  # fmt: skip


def digest(model: nn.Module) -> str:
    """Of the weights' bits; buffers differ between ranks by right."""
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()


def run(name: str, folder: Path, rank: int) -> dict[str, Any]:
    fails, module, callback, options = SCENARIOS[name]
    vars(step_guard)["reads_at_once"] = lambda _: "fused" not in module  # else by the flag, as on a GPU
    L.seed_everything(0, verbose=False)
    model = Net(fails, **module)
    saver = ModelCheckpoint(folder / name, every_n_train_steps=1, save_top_k=-1, save_on_exception=True)
    defaults: dict[str, Any] = {"strategy": "ddp"}
    halt = HaltOnNaN(directory=str(folder / name / "memtools"), **callback)
    defaults |= {"enable_checkpointing": True, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    run = trainer(folder / name, halt, saver, devices=2, logger=False, **(defaults | options()))
    begin = time.monotonic()
    seen: dict[str, Any] = {"scenario": name}
    try:
        run.fit(model, loader(rank, is_dirty=fails in {"sample", "talks"}), loader(rank, is_dirty=False))
    except NonFiniteError as error:
        seen |= {"step": error.step, "batch_idx": error.batch_idx, "rank": error.rank, "cause": error.cause,
                 "stage": error.stage, "message": str(error), "checkpoint": str(error.checkpoint_path),
                 "file": str(error.step_path),
                 "operation": error.explanation and error.explanation.operation}  # fmt: skip
    return seen | {
        "seconds": time.monotonic() - begin,
        "global_step": run.global_step,
        "is_off": halt.is_off,
        "digest": digest(model),
        "finite": all(bool(torch.isfinite(b).all()) for b in model.buffers()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)
    seen = []
    for name in SCENARIOS:
        seen.append(run(name, folder, rank))
        (folder / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
