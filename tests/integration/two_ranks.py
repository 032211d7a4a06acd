"""Runs of two ranks on the CPU over gloo, one after the other in one pair of processes; started by test_two_ranks.py.

LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... python two_ranks.py FOLDER [PART ...]
Each part writes to a folder of its own name.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_memtools
from lightning_memtools import (
    BatchSizeTuner,
    EmptyCache,
    GradientCheckpointing,
    HaltOnNaN,
    LossCurves,
    LossSpikeError,
    LossSpikes,
    MemoryMonitor,
    TrainingDoctor,
    TrainingMistakeError,
    VirtualDevice,
)
from lightning_memtools._torch import DispatchMode
from lightning_memtools.memory.sizes import MIB
from lightning_memtools.reporting.strategies import why_unsupported
from tests.batch_size_models import Samples
from tests.callbacks.spike_models import AT, Spiking, as_loader, batches, labels_times
from tests.checkpointing.models import encoder
from tests.integration.halt_on_ranks import digest
from tests.lightning_models import Regression, loader, trainer

RANK = int(os.environ.get("LOCAL_RANK", "0"))
SIZES = ("plain", "effective", "sync_dist", "own collective")
PLANS = ("ddp", "fsdp2", "untraceable")
ACTIONS = ("report", "skip", "rollback", "halt")


def sharded() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)


def leave(root: Path, name: str, seen: Any) -> None:
    (root / f"{name}{RANK}.json").write_text(json.dumps(seen))


class Uneven(Regression):
    """Rank 1 takes 40 MiB more in a training step, rank 0 30 MiB more in a test step."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net, FSDPModule):
            assert self.device_mesh is not None
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.empty(40 * MIB if self.global_rank == 1 else MIB, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        torch.empty(30 * MIB if self.global_rank == 0 else MIB, dtype=torch.uint8)
        return super().test_step(batch, batch_idx)


def monitored(root: Path, strategy: Any) -> None:
    L.seed_everything(0, verbose=False)
    model = Uneven()
    run = trainer(
        root,
        MemoryMonitor(snapshot_at_step=2),
        LossCurves(every_n_steps=2),
        logger=[TensorBoardLogger(root, name="", version="board"), CSVLogger(root, name="", version="table")],
        strategy=strategy,
        devices=2,
    )
    # Under DDP rank 1 validates three batches and rank 0 one. Under FSDP 2 the ranks have to run as many as each other.
    val = loader(16 + 32 * RANK if strategy == "ddp" else 32, 8)
    with (root / f"stdout{RANK}").open("w") as printed, contextlib.redirect_stdout(printed), VirtualDevice("1GiB"):
        run.fit(model, loader(48, 8), val)
        run.test(model, loader(16, 8), verbose=False)
    leave(root, "losses", {"train": model.train_losses, "val": model.val_losses})


class Leaking(Regression):
    """Leaves 10 MiB in the cache on rank 0 and 100 MiB on rank 1, which also keeps its validation outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.reserved_mib: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.empty((100 if self.global_rank else 10) * MIB, dtype=torch.uint8)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank:
            # More than what gloo's thread may still hold of a broadcast, some 512 bytes, or not.
            self.outputs.append(self.net(batch[0]).repeat(1, 4096))
        device = VirtualDevice.current()
        assert device is not None
        self.reserved_mib.append((device.stats().reserved or 0) / MIB)


def cache(root: Path) -> None:
    L.seed_everything(0, verbose=False)
    # Before the device is there: data sets are host memory.
    train, val, test = loader(32, 8), loader(16, 8), loader(16, 8)
    with warnings.catch_warnings(record=True) as said, VirtualDevice("1GiB"):
        warnings.simplefilter("always")
        model = Leaking()
        options = {"strategy": "ddp", "devices": 2, "max_epochs": 3, "num_sanity_val_steps": 0}
        logger = CSVLogger(root, name="", version="table")
        run = trainer(root, EmptyCache(), logger=logger, **options)
        run.fit(model, train, val)
        run.test(model, test, verbose=False)
    texts = [str(warning.message) for warning in said if "in a row" in str(warning.message)]
    leave(root, "cache", {"reserved_mib": model.reserved_mib, "warnings": texts})


class BadBatchError(Exception):
    """An error that cannot be unpickled: its message is not what its class takes."""

    def __init__(self, place: str, index: int) -> None:
        super().__init__(f"batch {index} of {place} is bad")


class Tuned(L.LightningModule):
    """BatchNorm, whose buffers DDP broadcasts in the first forward."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.batch_size = case, 4
        self.scale = nn.Parameter(torch.full((65_536,), 0.5))
        self.norm = nn.BatchNorm1d(1)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(len(batch))
        hidden = (batch * self.scale).tanh()
        loss: Tensor = self.norm(hidden.mean(1, keepdim=True)).square().mean() + hidden.square().mean()
        if self.case == "sync_dist":
            self.log("loss", loss, sync_dist=True)
        if self.case == "own collective":
            torch.distributed.all_reduce(loss.detach())
        if self.case == "error" and self.global_rank == 1:
            raise BadBatchError("rank 1", 7)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(400, 65_536), self.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tuned(root: Path, case: str) -> None:
    """One fit; the device of rank 1 is smaller. In "plain" the first size fits on every device but that one."""
    L.seed_everything(0, verbose=False)
    effective = 96 if case == "effective" else None
    first = 40 if case == "plain" else 8
    tuner = BatchSizeTuner(stages=("train",), effective_batch_size=effective, init_val=first, max_trials=5)
    model, found = Tuned(case), dict[str, Any]()
    options = {"strategy": "ddp", "devices": 2, "logger": False}
    with VirtualDevice("48MiB" if RANK else "128MiB"):
        run = trainer(root, tuner, limit_val_batches=0, **options)
        try:
            run.fit(model)
        except Exception as error:  # noqa: BLE001, what was raised is the result
            found["error"] = f"{type(error).__name__}: {error}"
    if tuner.result is not None:
        found |= {
            "size": tuner.result.sizes["train"],
            "accumulate": run.accumulate_grad_batches,
            "effective": tuner.result.effective_batch_size,
            "trials": [[trial.size, trial.outcome] for trial in tuner.result.trials],
            "base": next(trial.base_allocated for trial in tuner.result.trials if trial.fits),
            "limit": tuner.result.trials[0].limit,
            "seen": model.seen,
            "weights": float(model.scale.detach().double().sum()),
            "steps": run.global_step,
        }
    leave(root, case, found)


class Encoder(Regression):
    """An encoder in a Sequential, each of whose layers is a unit of its own under FSDP 2."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        width = 32 * tokens
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.Unflatten(1, (tokens, 32)), *encoder(4, 0.1), nn.Flatten(), nn.Linear(width, 1)
        )

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net, FSDPModule):
            assert self.device_mesh is not None
            for layer in (*self.net.children(), self.net):
                if next(layer.parameters(), None) is not None:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class TwoFactsError(Exception):
    """An error that pickle cannot make again: it is given two facts and keeps one text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}; {second}")


class Untraceable(Encoder):
    """Its step raises where it is traced, and only there."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if is_fake(batch[0]):
            raise TwoFactsError("no values", "no plan")
        return super().training_step(batch, batch_idx)


class Gathers(DispatchMode):
    """Counts the collectives that gather parameters."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += "allgather" in str(func).replace("_", "")
        return func(*args, **(kwargs or {}))


def planned(root: Path, case: str) -> None:
    for name in ("plain", "planned"):
        L.seed_everything(0, verbose=False)
        model = (Untraceable if case == "untraceable" else Encoder)(2)
        callback = GradientCheckpointing(bn_dropout="recompute")
        strategy = sharded() if case == "fsdp2" else "ddp"
        run = trainer(root, *([callback] if name == "planned" else []), strategy=strategy, devices=2, logger=False)
        with Gathers() as gathers, VirtualDevice("1GiB"):
            run.fit(model, loader(96, 16))
        plan = None if callback.plan is None else callback.plan.chains
        weights = {key: one.to_local() if isinstance(one, DTensor) else one for key, one in model.state_dict().items()}
        seen = {"weights": weights, "plan": plan, "gathered": gathers.number}
        torch.save(seen, root / f"{case}-{name}{RANK}.pt")


def every_callback(root: Path) -> None:
    """All callbacks that work under DDP at once, and none."""
    public = {name: getattr(lightning_memtools, name) for name in lightning_memtools.__all__}
    kinds = {name: one for name, one in public.items() if inspect.isclass(one) and issubclass(one, L.Callback)}
    names = [name for name in kinds if why_unsupported(name, DDPStrategy) is None and name != "BatchSizeTuner"]
    for used in ([], names):
        L.seed_everything(0, verbose=False)
        model = Encoder(16)
        with VirtualDevice("1GiB"):
            folder = root / ("with" if used else "without")
            made = [kinds[name](**({"loss": "mean"} if name == "OOMRecovery" else {})) for name in used]
            run = trainer(folder, *made, strategy="ddp", devices=2, max_epochs=2)
            run.fit(model, loader(96, 16), loader(32, 16))
        torch.save(model.state_dict(), root / f"{'with' if used else 'without'}{RANK}.pt")
    leave(root, "names", names)


class KeepsOnOneRank(Regression):
    """Rank 1 alone adds up losses with their graphs."""

    total: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_rank == 1:
            self.total = self.total + loss
        return loss


def mistaken(root: Path) -> None:
    run = trainer(root, TrainingDoctor(steps=8, on_finding="raise"), strategy="ddp", devices=2, logger=False)
    said = ""
    try:
        run.fit(KeepsOnOneRank(), loader(160), loader(32))
    except TrainingMistakeError as error:
        said = str(error)
    leave(root, "doctor", {"said": said, "steps": run.global_step})


def spiking(root: Path, action: Any) -> None:
    """Rank 1 alone has a bad batch."""
    torch.manual_seed(0)
    model = Spiking()
    made = [labels_times(30 if RANK and index == AT else 1)(batch) for index, batch in enumerate(batches())]
    options = {"action": "skip", "max_actions": 0} if action == "halt" else {"action": action, "every_n_steps": 20}
    spikes: Any = LossSpikes(**options, directory=str(root / action))
    run = trainer(root, HaltOnNaN(), spikes, logger=False, devices=2, strategy="ddp", use_distributed_sampler=False)
    error = ""
    try:
        run.fit(model, as_loader(made))
    except LossSpikeError as raised:
        error = str(raised)
    found = [(one.step, one.done, one.loss, one.norm, one.taken_back) for one in spikes.spikes]
    leave(root, action, {"error": error, "spikes": found, "global_step": run.global_step, "digest": digest(model)})


def sizes(root: Path) -> None:
    for case in SIZES:
        tuned(root, case)


def plans(root: Path) -> None:
    for case in PLANS:
        planned(root, case)


def spikes(root: Path) -> None:
    for action in ACTIONS:
        spiking(root, action)


PARTS: dict[str, Callable[[Path], None]] = {
    "monitor": lambda root: monitored(root, "ddp"),
    "monitor_sharded": lambda root: monitored(root, sharded()),
    "cache": cache,
    "sizes": sizes,
    "plans": plans,
    "every_callback": every_callback,
    "doctor": mistaken,
    "spikes": spikes,
    "error": lambda root: tuned(root, "error"),
}


def main(root: Path, *parts: str) -> None:
    torch.set_num_threads(1)
    for name in parts or PARTS:
        (root / name).mkdir(parents=True, exist_ok=True)
        PARTS[name](root / name)
    os._exit(0)  # after an error of one rank, the other may wait for it


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
