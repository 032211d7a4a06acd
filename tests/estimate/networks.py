"""Networks to estimate: small ones written here, each with one thing that is hard to get right."""

from __future__ import annotations

from itertools import pairwise

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for narrow, wide in pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Decoder(nn.Module):
    """A language model with tied embeddings, dropout and causal attention."""

    def __init__(self, n_tokens=500, width=64, n_heads=4, n_blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, width)
        self.blocks = nn.ModuleList([DecoderBlock(width, n_heads) for _ in range(n_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class DecoderBlock(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, hidden):
        batch, length, width = hidden.shape
        parts = self.qkv(self.norms[0](hidden)).view(batch, length, 3, self.n_heads, width // self.n_heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(self.norms[1](hidden))


class Classifier(pl.LightningModule):
    """Automatic optimization with a scheduler, a metric and logging."""

    def __init__(self):
        super().__init__()
        self.network = mlp(32, 256, 64, 4)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4)

    def training_step(self, batch, batch_idx):
        rows, classes = batch
        scores = self.network(rows)
        loss = F.cross_entropy(scores, classes)
        self.accuracy(scores, classes)
        self.log("train_loss", loss)
        self.log("train_accuracy", self.accuracy)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


class Gan(pl.LightningModule):
    """Manual optimization with two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = mlp(8, 128, 64), mlp(64, 128, 1)

    def training_step(self, batch, batch_idx):
        for_generator, for_critic = self.optimizers()
        made = self.generator(torch.zeros(batch.shape[0], 8))
        critic_loss = self.critic(made.detach()).mean() - self.critic(batch).mean()
        for_critic.zero_grad()
        self.manual_backward(critic_loss)
        for_critic.step()
        generator_loss = -self.critic(made).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.log_dict({"critic": critic_loss, "generator": generator_loss})

    def configure_optimizers(self):
        return [torch.optim.Adam(self.generator.parameters()), torch.optim.SGD(self.critic.parameters(), momentum=0.9)]


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def total(model, rows):
    return model(rows).sum()
