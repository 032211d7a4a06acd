"""Models whose memory grows with the batch in different ways, each with its data set."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[Tensor]):
    """n samples of one shape, created when requested, with the same values each time."""

    def __init__(self, n: int, *shape: int) -> None:
        self.n, self.shape = n, shape

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        return torch.full(self.shape, (index % 7) / 7)

    def fake_batch(self, indices: list[int]) -> Tensor:
        """Of the batch's shape, without its values."""
        return torch.empty(len(indices), *self.shape)


class Sized(L.LightningModule):
    """Base of the models; `body` maps a batch to a tensor whose mean square is the loss."""

    samples: tuple[int, ...] = (32,)
    n = 10_000

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.body = self.build()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, batch):
        return self.body(batch).float().square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch))

    def dataset(self) -> Dataset[Any]:
        return Samples(self.n, *self.samples)

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset(), self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset(), self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def wide(n_layers: int, *between: type[nn.Module], width: int = 16) -> nn.Sequential:
    """Element-wise layers on (batch, 16, 16384): much memory, little work."""
    layers: list[nn.Module] = []
    for _ in range(n_layers):
        layers += [Scale(width), *(kind() for kind in between)]
    return nn.Sequential(*layers)


class Scale(nn.Module):
    """Channel-wise scale and shift, each of which saves its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width, 1), 1.01))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Dropouts(Sized):
    """Dropout and activations."""

    samples = (16, 16384)

    def build(self) -> nn.Module:
        return wide(3, nn.ReLU, nn.Dropout)


class Normed(Sized):
    """Convolutions and BatchNorm."""

    samples = (3, 96, 96)

    def build(self) -> nn.Module:
        blocks: list[nn.Module] = []
        width = 3
        for _ in range(2):
            blocks += [nn.Conv2d(width, 16, 1), nn.BatchNorm2d(16), nn.ReLU()]
            width = 16
        return nn.Sequential(*blocks)


class Attention(Sized):
    """Self-attention with its matrix of weights kept, quadratic in the length."""

    samples = (192, 32)

    def build(self) -> nn.Module:
        self.qkv = nn.Linear(32, 96)
        return nn.LayerNorm(32)

    def loss(self, batch):
        q, k, v = self.qkv(self.body(batch)).view(len(batch), -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return (weights @ v).square().mean()


class Checkpointed(Sized):
    """Recomputes its segments in backward."""

    samples = (16, 16384)

    def build(self) -> nn.Module:
        return nn.ModuleList([wide(3, nn.GELU) for _ in range(3)])

    def loss(self, batch):
        assert isinstance(self.body, nn.ModuleList)
        x = batch.requires_grad_()
        for segment in self.body:
            x = checkpoint(segment, x, use_reentrant=False)
        return x.square().mean()


class Contrastive(Sized):
    """Compares every sample with every other: the peak grows with the square of the batch."""

    samples = (1024,)
    n = 100_000

    def build(self) -> nn.Module:
        return nn.Linear(1024, 16)

    def loss(self, batch: Any) -> Tensor:
        x = self.body(batch)
        return nn.functional.cross_entropy((x @ x.T).tanh(), torch.arange(len(x), device=x.device))


class Lengths(Dataset[Tensor]):
    """Sequences of 100 to 400 steps, with an attribute that lists their lengths."""

    def __init__(self, n: int) -> None:
        self.lengths = [100 + (i * 37) % 301 for i in range(n)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(self.lengths[index], 512)

    def fake_batch(self, indices: list[int]) -> Tensor:
        """Of the padded batch's shape, without its values."""
        return torch.empty(len(indices), max(self.lengths[i] for i in indices), 512)


def padded(sequences: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True)


class VariableLength(Sized):
    """Batches as long as their longest sequence."""

    n = 3_000

    def build(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(512), nn.GELU(), nn.LayerNorm(512), nn.GELU())

    def train_dataloader(self) -> Any:
        return DataLoader(Lengths(self.n), self.batch_size, collate_fn=padded)

    val_dataloader = train_dataloader


class Workspace(Sized):
    """An operator that takes a temporary workspace, by steps of the batch, as convolution algorithms do."""

    samples = (16, 16384)

    def build(self) -> nn.Module:
        return wide(4, nn.ReLU)

    def loss(self, batch: Any) -> Any:
        out = super().loss(batch)
        torch.empty((len(batch) // 16) * (6 << 20) + (2 << 20), dtype=torch.uint8)
        return out


class Heavy(Sized):
    """Has so many weights that the optimizer's temporary copies have a peak of their own."""

    samples = (16, 16384)

    def build(self) -> nn.Module:
        self.table = nn.Parameter(torch.zeros(8 << 20))
        return wide(3, nn.ReLU)

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + self.table[:4].sum()


class Accumulating(Dropouts):
    """Run with accumulate_grad_batches=4 and bfloat16."""

    options: dict[str, Any] = {"accumulate_grad_batches": 4, "precision": "bf16-mixed"}  # noqa: RUF012, read only


class Adversarial(Sized):
    """Two networks that are trained in turn, by hand, with toggled optimizers."""

    samples = (1024,)
    n = 100_000

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__(batch_size)
        self.automatic_optimization = False

    def build(self) -> nn.Module:
        self.generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1024))
        return nn.Sequential(nn.Linear(1024, 512), nn.LeakyReLU(), nn.Linear(512, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn(len(batch), 64, device=self.device)
        losses = (
            lambda: -self.body(self.generator(noise)).mean(),
            lambda: self.body(self.generator(noise).detach()).mean() - self.body(batch).mean(),
        )
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-4) for part in (self.generator, self.body)]


class IndexLimit(Dropouts):
    """Raises where a kernel would refuse so many elements, long before memory ends."""

    most = 40

    def loss(self, batch: Any) -> Any:
        if len(batch) > self.most:
            raise RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false.")
        return super().loss(batch)


class SeveralLoaders(Dropouts):
    """Takes a batch from each of two loaders, the second with samples of half the length."""

    def loss(self, batch: Any) -> Any:
        return super().loss(batch["long"]) + super().loss(batch["short"])

    def train_dataloader(self) -> Any:
        channels, length = self.samples
        return {
            "long": super().train_dataloader(),
            "short": DataLoader(Samples(self.n, channels, length // 2), self.batch_size),
        }


MODELS: dict[str, type[Sized]] = {
    "dropout": Dropouts,
    "batchnorm": Normed,
    "attention": Attention,
    "checkpointing": Checkpointed,
    "contrastive": Contrastive,
    "variable length": VariableLength,
    "workspace": Workspace,
    "many weights": Heavy,
    "accumulation, bf16": Accumulating,
    "adversarial, by hand": Adversarial,
    "index limit": IndexLimit,
    "several loaders": SeveralLoaders,
}


def trainer_for(kind: type[Sized], root: Any, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """A Trainer with the options that the model asks for."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "default_root_dir": root, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 3, "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
    }  # fmt: skip
    return L.Trainer(callbacks=list(callbacks), **(defaults | getattr(kind, "options", {}) | options))
