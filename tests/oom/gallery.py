"""Runs that people bring to the trackers: each runs out of memory, and fits once the report's advice is followed."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import OOMRecovery, OOMReport, VirtualDevice
from tests.lightning_models import trainer

MIB = 2**20
WIDTH = 16384


class Gain(nn.Module):
    """Scales each feature, and saves its input of 1 MiB for 16 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh()


class Net(L.LightningModule):
    """Four layers: a step takes about 10 MiB with the 16 samples of a batch, 1 MiB each activation."""

    def __init__(self, n_batches: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Gain() for _ in range(4)])
        self.n_batches = n_batches

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def sizes(self) -> list[int]:
        return [16] * self.n_batches

    def train_dataloader(self) -> Any:
        return loader(self.sizes())

    def val_dataloader(self) -> Any:
        return loader([16] * self.n_batches)


class Batches(torch.utils.data.Dataset[Tensor]):
    """Batches of these sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.sizes[index], WIDTH), 0.5)

    def __len__(self) -> int:
        return len(self.sizes)


def loader(sizes: list[int]) -> DataLoader[Any]:
    return DataLoader(Batches(sizes), batch_size=None)


@dataclass(frozen=True)
class Exhibit:
    """A run that fails.

    Attributes:
        run: Runs it: `run(fit, mended=...)`, where `fit(model, *callbacks, **options)` trains; mended, it does as the
            advice says.
        cause: What the report's first line has to name.
        advice: What its first action has to say.
        capacity_mib: The device.
        on_cpu: False for what has to leave the device for the host, which are one on a VirtualDevice.
        on_cuda: False for what PyTorch's CUDA code on a device that computes nothing cannot show.
    """

    run: Callable[..., object]
    cause: Iterable[str]
    advice: Iterable[str]
    capacity_mib: int = 32
    on_cuda: bool = True
    on_cpu: bool = True


EXHIBITS: dict[str, Exhibit] = {}


class FitOn:
    """Trains a module under a Trainer of its own with OOMReport."""

    def __init__(self, root: Path, device: str) -> None:
        self.root, self.device = root, device

    def trainer(self, *callbacks: Any, **options: Any) -> Any:
        """Return a Trainer with OOMReport."""
        defaults = {"accelerator": "cuda" if self.device == "cuda" else "cpu", "devices": 1, "logger": False}
        report = OOMReport(directory=str(self.root))
        return trainer(self.root, *callbacks, report, **({"num_sanity_val_steps": 0} | defaults | options))

    def __call__(self, module: L.LightningModule, *callbacks: Any, validate: bool = False, stays: bool = False,
                 ckpt_path: Any = None, datamodule: Any = None, **options: Any) -> Any:  # fmt: skip
        if not validate:
            options["limit_val_batches"] = 0
        run = self.trainer(*callbacks, **options)
        run.fit(module, ckpt_path=ckpt_path, datamodule=datamodule)
        if stays:  # Lightning moves the model to the host
            module.to(self.device)
        return run


def exhibit(*cause: str, advice: Iterable[str], fit_options: Any = None, **options: Any) -> Callable[[Any], Any]:
    """Show a function as its `run`, or a module that is trained: made with `mended`, and with the options given."""

    def add(run: Any) -> Any:
        def train(fit: FitOn, *, mended: bool) -> None:
            fit(run(mended=mended), **(fit_options or {}))

        EXHIBITS[run.__name__] = Exhibit(train if isinstance(run, type) else run, cause, advice, **options)
        return run

    return add


class Case(Net):
    """A module with a mistake, which is mended or not."""

    def __init__(self, *, mended: bool, n_batches: int = 24) -> None:
        super().__init__(n_batches)
        self.mended = mended
        self.kept: list[Any] = []


# --- what the run itself keeps


@exhibit("`KeepsOutputs.kept` holds", advice=("list", "detach"))
class KeepsOutputs(Case):
    def training_step(self, batch, batch_idx):
        out = self(batch)
        self.kept.append(float(out.detach().mean()) if self.mended else out)
        return out.square().mean()


@exhibit("`KeepsLogProbabilities.kept` holds", advice=("autograd graph", "detach"))
class KeepsLogProbabilities(Case):
    """The losses of an agent: small, each with the large graph of a forward pass that is never run backward."""

    def training_step(self, batch, batch_idx):
        value = self(batch).mean()
        self.kept.append(value.detach() if self.mended else value)
        return self(batch).square().mean()


class Snapshots(L.Callback):
    """Keeps a copy of the weights of each epoch: 4 MiB each."""

    def __init__(self, *, keeps: bool) -> None:
        self.copies: list[nn.Module] = []
        self.keeps = keeps

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.keeps:
            self.copies.append(LargeNet().to(pl_module.device))


@exhibit("`Snapshots.copies` holds", advice=("Keep on the host, or do without", "LargeNet"))
def copies_of_the_model(fit: FitOn, *, mended: bool) -> None:
    fit(Net(2), Snapshots(keeps=not mended), max_epochs=9)


@exhibit("`checkpoint in main", "holds", advice=("`del checkpoint`",))
def a_checkpoint_that_stays(fit: FitOn, *, mended: bool) -> None:
    def main() -> None:
        checkpoint = {"epoch": 3, "moments": [torch.zeros(3 * MIB, device=fit.device) for _ in range(2)]}
        net = Net(2)
        assert checkpoint["epoch"] == 3
        if mended:
            del checkpoint
        fit(net)

    main()


class DataOnDevice(L.LightningDataModule):
    """Keeps its data on the device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.data = torch.full((400, WIDTH), 0.5, device=device)

    def train_dataloader(self) -> Any:
        return DataLoader(list(self.data.cpu().split(16)[:2]), batch_size=None)  # type: ignore[arg-type]


@exhibit("`DataOnDevice.data` holds", advice=("Keep on the host",), on_cpu=False)
def a_data_set_on_the_device(fit: FitOn, *, mended: bool) -> None:
    fit(Net(), datamodule=DataOnDevice("cpu" if mended else fit.device))


@exhibit("errors in search", "holds", advice=("errors",), capacity_mib=64)
def an_error_that_is_kept_with_its_frames(fit: FitOn, *, mended: bool) -> None:
    def fails() -> None:
        results = [torch.zeros(4 * MIB, device=fit.device) for _ in range(2)]
        raise ValueError(f"{len(results)} results")

    def search() -> None:
        errors: list[Any] = []
        try:
            fails()
        except ValueError as error:
            errors.append(str(error) if mended else error)
        fit(KeepsNothing())

    search()


# --- what is left of other runs


class LargeNet(Net):
    """4 MiB of weights, and a step that takes 40 MiB."""

    def __init__(self, table_mib: int = 4) -> None:
        super().__init__(2)
        self.table = nn.Parameter(torch.zeros(table_mib * MIB // 4))

    def sizes(self) -> list[int]:
        return [64] * 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean() + self.table.mean()


@exhibit("`models in folds", "another run", advice=("Delete what is left of another run", "LargeNet"), capacity_mib=80)
def models_of_earlier_folds(fit: FitOn, *, mended: bool) -> None:
    def folds() -> None:
        models: list[Net] = []
        for _ in range(4):
            if mended:
                models.clear()
                gc.collect()
            model = LargeNet().to(fit.device)
            fit(model, stays=True)
            models.append(model)

    folds()


@exhibit("Garbage", advice=("gc.collect()",), capacity_mib=64)
def garbage_in_a_cycle(fit: FitOn, *, mended: bool) -> None:
    class Node:
        """Refers to itself."""

        itself: Any
        data: Tensor

    gc.collect()
    gc.disable()
    try:
        for _ in range(40):
            node = Node()
            node.itself, node.data = node, torch.zeros(MIB // 4, device=fit.device)
            del node
        if mended:
            gc.collect()
        fit(KeepsNothing())
    finally:
        gc.enable()


class KeepsNothing(Net):
    def sizes(self) -> list[int]:
        return [48]


# --- memory in pieces


class Pinned(Net):
    """Its buffers lie in segments that were made for larger tensors."""

    def __init__(self) -> None:
        super().__init__(3)

    def on_fit_start(self) -> None:
        for index in range(3):
            large = torch.empty(18 * MIB, dtype=torch.uint8, device=self.device)
            del large
            self.register_buffer(f"pin{index}", torch.zeros(19 * MIB // 2, dtype=torch.uint8, device=self.device))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = torch.zeros(16 * MIB, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx) + mask[0]


@exhibit("fragmentation", advice=("expandable_segments:True",), capacity_mib=70, on_cuda=False)
def buffers_that_pin_half_empty_segments(fit: FitOn, *, mended: bool) -> None:
    if mended:
        device = VirtualDevice.current()
        assert device is not None
        device.__exit__()
        with VirtualDevice(70 * MIB, allocator="expandable_segments:True"):
            fit(Pinned())
        return
    fit(Pinned())


# --- evaluation, prediction and other programs


class PredictsMuch(Net):
    def predict_dataloader(self):
        return loader([16] * 40)

    def predict_step(self, batch):
        return self(batch)


# On a GPU, Lightning moves predictions to the host.
@exhibit("predictions` holds", advice=("list", "fits"), on_cuda=False)
def predictions_that_are_kept(fit: FitOn, *, mended: bool) -> None:
    fit.trainer().predict(PredictsMuch(), return_predictions=not mended)


@exhibit("others (simulated) (pid 0) holds", advice=("Stop others",), capacity_mib=64, on_cuda=False)
def another_program_on_the_device(fit: FitOn, *, mended: bool) -> None:
    device = VirtualDevice.current()
    assert device is not None
    device.__exit__()
    with VirtualDevice(64 * MIB, used_by_others="1MiB" if mended else "40MiB"):
        fit(LargeNet())


# --- the step itself


class Activations(Net):
    def __init__(self, batch: int = 96) -> None:
        super().__init__(2)
        self.batch = batch

    def sizes(self):
        return [self.batch] * self.n_batches


class Adversaries(Activations):
    """Two optimizers in manual optimization; memory runs out while one of them is toggled."""

    def __init__(self, batch: int = 96) -> None:
        super().__init__(batch)
        self.automatic_optimization = False
        self.critic = nn.Sequential(Gain(), Gain())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.critic(self(batch)).mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (self.layers, self.critic)], []


@exhibit("Activations take", advice=("Use training batches of",), capacity_mib=40)
def toggled_optimizers(fit: FitOn, *, mended: bool) -> None:
    fit(Adversaries(16 if mended else 96))


# --- odd batches


class DenseLabels(Net):
    """One batch has forty times the boxes: few bytes, but what is compared with each of them is much."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pairs = batch["boxes"][:, :, None] - torch.ones(512, 4, device=self.device)
        return self(batch["image"]).square().mean() + pairs.square().mean()

    def train_dataloader(self) -> Any:
        counts = [3, 12, 7, 5, 480, 4]
        data: Any = [{"image": torch.ones(8, WIDTH), "boxes": torch.ones(8, n, 4)} for n in counts]
        return DataLoader(data, batch_size=None)


@exhibit('`batch["boxes"]` is [8, 480, 4], usually at most [8, 12, 4]', capacity_mib=48,
         advice=("OOMRecovery(", "it then fits", "sort or bucket"))  # fmt: skip
def one_batch_with_many_boxes(fit: FitOn, *, mended: bool) -> None:
    fit(DenseLabels(), *([OOMRecovery(loss="mean")] if mended else []))


# --- healthy runs, in which much is kept on purpose


class Healthy(Net):
    """Keeps a ring of features and a queue of momentum features; its last batch is too large."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.ring: deque[Tensor] = deque(maxlen=2)
        self.register_buffer("queue", torch.zeros(32, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch)
        self.ring.append(out.detach())
        self.queue = torch.cat([self.queue[16:], out.detach()[:16]])
        return out.square().mean()

    def sizes(self) -> list[int]:
        return [24] * 12 + [34]


class Average(L.Callback):
    """An average of the weights."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.copy = deepcopy(pl_module.layers)
        self.copy.requires_grad_(requires_grad=False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for own, other in zip(self.copy.parameters(), pl_module.layers.parameters(), strict=True):
            own.lerp_(other.detach(), 0.1)
