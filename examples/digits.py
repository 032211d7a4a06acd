"""The main job: add callbacks to a Trainer, train a real model on real data, look at TensorBoard.

scikit-learn's 1,797 handwritten digits and a convolutional network of Sequential blocks with BatchNorm and Dropout.
Without a GPU it trains inside a VirtualDevice, which shows the memory that the same run would take on a GPU. This
one is as small as the network, so that the charts show something.

    python examples/digits.py [--epochs 8] [--logs logs]
"""

import argparse
from contextlib import nullcontext

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_memtools import VirtualDevice, default_callbacks


def block(n_in: int, n_out: int) -> nn.Sequential:
    """Two convolutions that keep the picture's size."""
    layers: list[nn.Module] = []
    for n in (n_in, n_out):
        layers += [nn.Conv2d(n, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Dropout2d(0.1))


class DigitClassifier(L.LightningModule):
    """Pictures of shape (batch, 1, 8, 8) to logits of shape (batch, 10)."""

    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.features = nn.Sequential(block(1, 32), nn.MaxPool2d(2), block(32, 64), nn.MaxPool2d(2), block(64, 128))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.features(pictures))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002, Lightning passes it
        """Cross entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:  # noqa: ARG002, as above
        """Cross entropy."""
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:  # noqa: ARG002, as above
        """Accuracy."""
        self.accuracy(self(batch[0]), batch[1])
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def loaders(batch_size: int = 64) -> tuple[DataLoader[tuple[Tensor, ...]], ...]:
    """The digits as train, validation and test loaders; pixels are scaled to [0, 1]."""
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    parts = random_split(TensorDataset(pictures, torch.tensor(digits.target)), [0.7, 0.15, 0.15])
    return tuple(DataLoader(part, batch_size, shuffle=i == 0, drop_last=i == 0) for i, part in enumerate(parts))


def main() -> None:
    """Train, test, and say where to look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--logs", default="logs", help="where event files and reports go")
    args = parser.parse_args()

    L.seed_everything(0)
    train, val, test = loaders()
    trainer = L.Trainer(
        max_epochs=args.epochs,
        log_every_n_steps=5,
        default_root_dir=args.logs,
        callbacks=default_callbacks(),
        enable_checkpointing=False,
    )
    model = DigitClassifier()
    with nullcontext() if torch.accelerator.is_available() else VirtualDevice("16MiB"):
        trainer.fit(model, train, val)
        accuracy = float(trainer.test(model, test)[0]["test_accuracy"])
    print(f"\nAccuracy on {len(test.dataset)} test digits: {100 * accuracy:.1f}%")  # type: ignore[arg-type]
    print(f"Logs and reports: {trainer.log_dir}")
    print(f"To look at them:  tensorboard --logdir {args.logs}   then open http://localhost:6006/#lightning_memtools")


if __name__ == "__main__":
    main()
