"""Run as a program, once per rank: a rank of FSDP 2 runs out of memory, and goes on. Writes what each rank saw as JSON.

LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... python tests/integration/recovery_on_shards.py <folder> <scenario> ...
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_memtools import HaltOnNaN, OOMRecovery
from tests.integration.recovery_on_ranks import Failures, RunsOut
from tests.lightning_models import trainer

WIDTH, LAYERS, SAMPLES = 16, 4, 8
WHOLE = (SAMPLES,)
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 MiB."


class Block(nn.Module):
    """A linear layer, in whose backward pass memory runs out if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs_out = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = RunsOut.apply(torch.tanh(self.linear(x)), self.runs_out)
        return out


class Net(L.LightningModule):
    """Blocks that are sharded one by one, a head that the root holds, a buffer and a metric."""

    count: Tensor

    def __init__(self, failures: Failures) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.seen_samples = MeanMetric()
        self.failures = failures
        self.seen: list[int] = []

    def data(self, rank: int) -> list[Tensor]:
        return batches(rank)

    def validation_data(self, data: list[Tensor]) -> list[Any]:
        return [data]

    def blocks(self) -> list[Block]:
        return [one for one in self.net if isinstance(one, Block)]

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for layer in self.blocks():
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def fails(self, batch: Tensor, key: tuple[int, int]) -> str | int:
        place, sizes = self.failures.get(key, ("", ()))
        return place if len(batch) in sizes else ""

    def run_blocks(self, batch: Tensor, place: str | int) -> Tensor:
        for index, block in enumerate(self.blocks()):
            block.runs_out = place == index
        handle = None
        if place == "forward":
            handle = self.net[2].register_forward_hook(_run_out)
        try:
            out: Tensor = self.net(batch)
        finally:
            if handle is not None:
                handle.remove()
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(len(batch))
        self.count += len(batch)
        self.seen_samples.update(float(batch.sum()))
        out = self.run_blocks(batch, self.fails(batch, (self.global_rank, batch_idx)))
        loss: Tensor = (out - batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = self.run_blocks(batch, "")
        self.log("val_loss", (out - batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


SCENARIOS: dict[str, Failures] = {
    "forward": {(1, 2): ("forward", WHOLE)},
    "forward_of_the_first_step": {(1, 0): ("forward", WHOLE)},
    **{f"backward_of_block_{layer}": {(1, 2): (layer, WHOLE)} for layer in range(LAYERS)},
    "rank_0": {(0, 2): (1, WHOLE)},
    "both_ranks": {(0, 2): ("forward", WHOLE), (1, 2): (1, WHOLE)},
}


class Clamps(Net):
    """Changes gradients in a hook, which sees those that earlier batches accumulated too."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.02, 0.02)


class GathersFirst(Net):
    """Gathers parameters before the forward pass begins."""

    def on_train_batch_start(self, *_: Any) -> None:
        root: Any = self.net
        root.unshard(async_op=True)


class Divides(Net):
    """Divides by a parameter of one number, of which rank 1 holds nothing."""

    def configure_model(self) -> None:
        self.net.register_parameter("divisor", nn.Parameter(torch.ones(1)))
        super().configure_model()
        self.net.register_forward_hook(lambda module, _inputs, out: out / module.divisor, prepend=True)


class SplitsBatches(Net):
    """Has its own function to split batches, and fewer samples on rank 0."""

    def split_batch(self, batch: Tensor, n: int) -> list[Tensor]:
        size = len(batch) // n
        return [batch[i * size : (i + 1) * size if i < n - 1 else None] for i in range(n)]

    def data(self, rank: int) -> list[Tensor]:
        return [one[:3] if rank == 0 else one for one in batches(rank)]


class TwoKindsOfBatches(Net):
    """Validates with one loader of tensors and one of dictionaries."""

    def validation_data(self, data: list[Tensor]) -> list[Any]:
        return [data, [{"x": one} for one in data]]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x = batch["x"] if dataloader_idx else batch
        self.run_blocks(x, self.fails(x, (self.global_rank, 100 * dataloader_idx + batch_idx)))


class RootAlone(Net):
    """Its parameters stay gathered from the first batch of an evaluation on; the ranks have unequal numbers of them."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def validation_data(self, data: list[Tensor]) -> list[Any]:
        return [data[: 6 - 2 * int(os.environ["LOCAL_RANK"])]]

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen.append(-len(batch))
        place = self.fails(batch, (self.global_rank, -batch_idx))
        out = self.run_blocks(batch, place)
        if place == "end":
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        self.log("val_loss", (out - batch).square().mean(), sync_dist=True)
        return out


class KeepsWholeGradients(Net):
    """Reduces the gradients of every other batch alone, and has the switch on again when a step begins."""

    def backward(self, loss: Tensor, *_: Any) -> None:
        root: Any = self.net
        root.set_requires_gradient_sync(len(self.seen) % 2 == 0)
        loss.backward()
        root.set_requires_gradient_sync(True)


class GathersFeatures(Net):
    """Has a collective in its step that is as large as the batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        of_all: Any = self.all_gather(batch)
        total: Tensor = loss + of_all.square().mean()
        return total


class OfOneBatch(Net):
    """Fails in parts of the batch that is named, which a stand-in of another one is not; no such run has that batch."""

    leaves_out: ClassVar[list[int]] = []

    def data(self, rank: int) -> list[Tensor]:
        return [one for index, one in enumerate(batches(rank)) if self.failures or index not in self.leaves_out]

    def fails(self, batch: Tensor, key: tuple[int, int]) -> str | int:
        place = super().fails(batch, key)
        return place if key in self.failures and self.is_meant(batch, batches(key[0])[key[1]]) else ""

    def is_meant(self, part: Tensor, batch: Tensor) -> bool:
        return bool((batch == part[0]).all(1).any())


class Skips(OfOneBatch):
    leaves_out: ClassVar[list[int]] = [2]


class SkipsOneOfSeveral(OfOneBatch):
    """Its run without a failure has a loss of 0 for that batch, which adds nothing to what others accumulated."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 if self.failures or batch_idx != 2 else 0)


class FailsLast(OfOneBatch):
    def is_meant(self, part: Tensor, batch: Tensor) -> bool:
        return bool((batch[-1] == part[-1]).all())


class Synced(Net):
    """Logs means over the ranks."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("synced", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss


class SyncedSum(Synced):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = len(batch) * super().training_step(batch, batch_idx)
        self.log("sum", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 / SAMPLES, momentum=0.9)


class WithAdamW(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# Kind of model, where it fails, and the Trainer's options.
Variant = tuple[type[Net], Failures, dict[str, Any]]
ACCUMULATING: dict[str, Any] = {"accumulate_grad_batches": 2}
VARIANTS: dict[str, Variant] = {
    "nothing fails, accumulated": (Clamps, {}, ACCUMULATING),
    "accumulated": (Net, {(1, 3): (1, WHOLE)}, ACCUMULATING),
    "gathered first": (GathersFirst, {(1, 0): ("forward", WHOLE)}, {}),
    "divides": (Divides, {(1, 2): (1, WHOLE)}, {}),
    "own function to split": (SplitsBatches, {(1, 2): (1, (8, 4))}, {}),
    "two kinds of batches": (TwoKindsOfBatches, {(1, 102): ("forward", WHOLE)}, {}),
    "gathered in evaluation": (RootAlone, {(0, -3): ("forward", WHOLE), (1, -2): ("end", WHOLE)}, {}),
    "last part": (FailsLast, {(1, 2): (1, (8, 4))}, {}),
    "skipped": (Skips, {(1, 2): (1, tuple(range(9)))}, {}),
    "skipped, accumulated": (SkipsOneOfSeveral, {(1, 2): ("forward", tuple(range(9)))}, {"accumulate_grad_batches": 3}),
    "AdamW, clipped": (WithAdamW, {(1, 2): (1, WHOLE)}, {"gradient_clip_val": 0.1}),
    "mean over the ranks": (Synced, {(1, 2): (1, WHOLE)}, {}),
    "sum, over the ranks": (SyncedSum, {(1, 2): ("forward", WHOLE)}, {}),
    "bf16": (Synced, {(0, 1): (2, WHOLE), (1, 3): ("forward", (4,))}, {"precision": "bf16-mixed"}),
}
GIVEN: dict[str, dict[str, Any]] = {
    "skipped": {"skip_batch": True},
    "skipped, accumulated": {"skip_batch": True},
    "sum, over the ranks": {"loss": "sum"},
}
REFUSED: dict[str, Variant] = {
    "whole gradients": (KeepsWholeGradients, {}, ACCUMULATING),
    "gives up": (OfOneBatch, {(1, 2): (1, tuple(range(9)))}, {}),
    "gathers features": (GathersFeatures, {(1, 2): ("forward", WHOLE)}, {}),  # the last: its ranks lose each other
}


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(6)]


def fit(folder: Path, model: Net, data: list[Tensor], *callbacks: L.Callback, **options: Any) -> L.Trainer:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    defaults: dict[str, Any] = {"strategy": strategy, "devices": 2, "logger": False, "use_distributed_sampler": False}
    run = trainer(folder, *callbacks, **(defaults | options))
    dataset: Any = data
    validation = [DataLoader(one, batch_size=None) for one in model.validation_data(data)]
    run.fit(model, DataLoader(dataset, batch_size=None), validation)
    return run


def shards(model: nn.Module) -> list[Tensor]:
    return [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


def compared(model: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(shards(model), shards(other), strict=True) if a.numel())


@cache
def healthy_run(folder: Path, rank: int) -> tuple[Net, Net, dict[str, float]]:
    """The model before and after a run in which nothing fails, and what was logged."""
    start, model, data = Net({}), Net({}), batches(rank)
    fit(folder, start, data, max_steps=0)
    done = fit(folder, model, data)
    return start, model, {key: float(value) for key, value in done.callback_metrics.items()}


def run(name: str, folder: Path, rank: int) -> dict[str, Any]:
    start, healthy, logged = healthy_run(folder, rank)
    model, recovery = Net(SCENARIOS[name]), OOMRecovery(on_recover="ignore", loss="mean")
    done = fit(folder, model, batches(rank), recovery)
    return {
        "scenario": name,
        "error": compared(model, healthy),
        "moved": compared(model, start),
        "count": float(model.count),
        "metric": float(model.seen_samples.mean_value),
        "healthy_metric": float(healthy.seen_samples.mean_value),
        "logged": {key: float(value) for key, value in done.callback_metrics.items()},
        "healthy_logged": logged,
        "seen": model.seen,
        "global_step": done.global_step,
        "recoveries": recovery.recoveries.n_recovered,
    }


def run_variant(name: str, folder: Path, rank: int) -> dict[str, Any]:
    kind, failures, options = (VARIANTS | REFUSED)[name]
    given: dict[str, Any] = {"on_recover": "ignore", "loss": "mean"} | GIVEN.get(name, {})
    model, healthy, recovery = kind(failures), kind({}), OOMRecovery(**given)
    said, logged, off = "", [], 0.0
    try:
        logged.append(fit(folder, model, model.data(rank), recovery, HaltOnNaN(), **options).callback_metrics)
    except Exception as error:  # noqa: BLE001, what is raised is what is looked at
        said = f"{type(error).__name__}: {error}"
    if name in VARIANTS:
        logged.append(fit(folder, healthy, healthy.data(rank), **options).callback_metrics)
        off = compared(model, healthy)
    return {
        "scenario": name,
        "error": off,
        "seen": model.seen,
        "said": said,
        "n": recovery.recoveries.n_recovered,
        "skipped": recovery.recoveries.n_skipped,
        "logged": [{key: float(value) for key, value in one.items()} for one in logged],
    }


def main() -> None:
    warnings.simplefilter("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)
    seen = []
    for name in sys.argv[2:]:
        seen.append((run if name in SCENARIOS else run_variant)(name, folder, rank))
        (folder / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
