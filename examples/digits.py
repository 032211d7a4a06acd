"""Learn to read handwritten digits, on a simulated GPU where there is no real one."""

import argparse
from contextlib import nullcontext

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_memtools import (
    BatchSizeTuner,
    GradientCheckpointing,
    NonFiniteError,
    VirtualDevice,
    default_callbacks,
)


def block(n_in, n_out):
    conv = nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(8, n_out), nn.ReLU())


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(block(1, 32), block(32, 64), nn.MaxPool2d(2)),
            *(block(64, 128), block(128, 128), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )

    def forward(self, pictures):
        contrast = pictures.std(dim=(1, 2, 3), keepdim=True)
        return self.net(pictures / contrast)

    def training_step(self, batch, batch_idx):
        pictures, digits = batch
        return cross_entropy(self(pictures), digits)

    def validation_step(self, batch, batch_idx):
        pictures, digits = batch
        logits = self(pictures)
        self.log("val_loss", cross_entropy(logits, digits))
        self.log("accuracy", (logits.argmax(1) == digits).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loaders(batch_size, blank=False):
    data = load_digits()  # 1797 pictures of 8 x 8 pixels
    pictures = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    if blank:
        pictures[400] = 0
    rows = TensorDataset(pictures, torch.tensor(data.target))
    train, val = random_split(rows, [1536, 261])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--fit", action="store_true", help="make large batches fit")
    parser.add_argument("--blank", action="store_true", help="with a blank picture")
    parser.add_argument("--logs", default=".", help="the folder of lightning_logs")
    args = parser.parse_args()

    L.seed_everything(0)
    callbacks = default_callbacks()
    if args.fit:
        tuner = BatchSizeTuner(stages=["train"], max_trials=4)
        callbacks += [GradientCheckpointing(), tuner]
    trainer = L.Trainer(
        max_epochs=args.epochs,
        log_every_n_steps=1,
        default_root_dir=args.logs,
        enable_checkpointing=False,
        callbacks=callbacks,
    )
    has_gpu = torch.accelerator.is_available()
    try:
        with nullcontext() if has_gpu else VirtualDevice("50MiB"):
            trainer.fit(Digits(), *loaders(args.batch_size, args.blank))
    except (torch.OutOfMemoryError, NonFiniteError) as error:
        raise SystemExit(error) from None
    print(f"accuracy: {trainer.callback_metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
