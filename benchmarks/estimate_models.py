"""Models, batches, optimizers and precisions that estimates are compared on. torch only: no downloads, no torchvision.

Networks keep the widths, depths and kernels of those they are named after, so that sizes of activations and weights
are the real ones; details that take no memory are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Precision = Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: what is trained, on what, and how.

    Attributes:
        name: What it is called in the results.
        build: Makes the model.
        batch: Makes the batch on a device.
        step: Computes the loss.
        optimizer: Makes the optimizer.
        precision: By Lightning's names.
        clip: The norm to clip gradients to.
        kernel: The only kernel that attention may take; None for whichever CUDA chooses.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[str], list[torch.Tensor]]
    step: Callable[[Any, Any], Any]
    optimizer: MakeOptimizer
    precision: Precision = "32-true"
    clip: float | None = None
    kernel: SDPBackend | None = None

    def attention(self) -> AbstractContextManager[Any]:
        """Where the step runs."""
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)


# --- convolutional networks


def conv(n_in: int, n_out: int, size: int = 3, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution, batch norm, ReLU in place."""
    layer = nn.Conv2d(n_in, n_out, size, stride=stride, padding=size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(n_out), nn.ReLU(inplace=True)]


def alexnet() -> nn.Module:
    shapes = [(3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1)]
    layers: list[nn.Module] = []
    for i, (n_in, n_out, size, stride, padding) in enumerate(shapes):
        layers += [nn.Conv2d(n_in, n_out, size, stride, padding), nn.ReLU(inplace=True)]
        if i in {0, 1, 4}:
            layers.append(nn.MaxPool2d(3, 2))
    head = [nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096)]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.ReLU(inplace=True), nn.Linear(4096, 1000))


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    n_in = 3
    for widths in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
        for n_out in widths:
            layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(inplace=True)]
            n_in = n_out
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(25088, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Dropout(), nn.Linear(4096, 1000))


class Shortcut(nn.Module):
    """A body beside a shortcut, summed."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, *, relu: bool) -> None:
        super().__init__()
        self.body, self.shortcut, self.relu = body, shortcut, relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + self.shortcut(x)
        return functional.relu(out, inplace=True) if self.relu else out


def resnet(blocks: Sequence[int], *, bottleneck: bool) -> nn.Module:
    layers = [*conv(3, 64, 7, stride=2), nn.MaxPool2d(3, 2, 1)]
    n_in, expansion = 64, 4 if bottleneck else 1
    for i, (n_blocks, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True)):
        for j in range(n_blocks):
            stride = 2 if i > 0 and j == 0 else 1
            n_out = width * expansion
            if bottleneck:
                body = [*conv(n_in, width, 1), *conv(width, width, stride=stride), *conv(width, n_out, 1)[:2]]
            else:
                body = [*conv(n_in, width, stride=stride), *conv(width, width)[:2]]
            same = stride == 1 and n_in == n_out
            shortcut: nn.Module = nn.Identity() if same else nn.Sequential(*conv(n_in, n_out, 1, stride=stride)[:2])
            layers.append(Shortcut(nn.Sequential(*body), shortcut, relu=True))
            n_in = n_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 1000))


def mobilenet() -> nn.Module:
    """MobileNetV2."""
    layers = conv(3, 32, stride=2)
    n_in = 32
    settings = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    for widening, n_out, n_blocks, first_stride in settings:
        for j in range(n_blocks):
            stride = first_stride if j == 0 else 1
            wide = n_in * widening
            body = [*(conv(n_in, wide, 1) if widening > 1 else []), *conv(wide, wide, stride=stride, groups=wide)]
            block: nn.Module = nn.Sequential(*body, *conv(wide, n_out, 1)[:2])
            layers.append(Shortcut(block, nn.Identity(), relu=False) if stride == 1 and n_in == n_out else block)
            n_in = n_out
    return nn.Sequential(*layers, *conv(n_in, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """Depthwise convolution, then a perceptron over the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mlp(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        out: torch.Tensor = x + self.scale * mixed
        return out


def convnext() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96)]
    for i, (n_blocks, width) in enumerate(zip((3, 3, 9, 3), (96, 192, 384, 768), strict=True)):
        if i:
            layers += [ChannelNorm(width // 2), nn.Conv2d(width // 2, width, 2, 2)]
        layers += [ConvNextBlock(width) for _ in range(n_blocks)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, 1000))


class UNet(nn.Module):
    """Three levels down and up again, with skips."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList([self.block(n_in, n_out) for n_in, n_out in zip([3, *widths], widths, strict=False)])
        self.wider = nn.ModuleList([nn.ConvTranspose2d(2 * n, n, 2, 2) for n in reversed(widths[:-1])])
        self.up = nn.ModuleList([self.block(2 * n, n) for n in reversed(widths[:-1])])
        self.out = nn.Conv2d(width, 10, 1)

    @staticmethod
    def block(n_in: int, n_out: int) -> nn.Module:
        return nn.Sequential(*conv(n_in, n_out), *conv(n_out, n_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for wider, up, skip in zip(self.wider, self.up, reversed(skips[:-1]), strict=True):
            x = up(torch.cat([wider(x), skip], 1))
        out: torch.Tensor = self.out(x)
        return out


# --- transformers and recurrent networks


class Attention(nn.Module):
    """Self-attention by torch's fused function."""

    def __init__(self, width: int, n_heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.causal, self.dropout = n_heads, causal, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=self.dropout)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, n_heads: int, *, causal: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, n_heads, causal=causal, dropout=dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class LanguageModel(nn.Module):
    """GPT-2's shape: learned positions, tied head."""

    def __init__(self, n_blocks: int = 12, width: int = 768, n_heads: int = 12, n_tokens: int = 50257) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(n_tokens, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, n_heads, causal=True) for _ in range(n_blocks)), nn.LayerNorm(width))
        self.head = nn.Linear(width, n_tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        out: torch.Tensor = self.head(self.blocks(self.tokens(tokens) + self.positions(places)))
        return out


class Vit(nn.Module):
    """A vision transformer with mean pooling."""

    def __init__(self, n_blocks: int = 12, width: int = 384, n_heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(
            *(Block(width, n_heads, causal=False) for _ in range(n_blocks)), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
        return out


class Recurrent(nn.Module):
    """A language model over two recurrent layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 256)
        self.layers = getattr(nn, kind)(256, 512, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(512, 10_000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embedding(tokens))[0])
        return out


def perceptron() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(2048, 1000))


# --- cases


def images(n: int, size: int = 224) -> Callable[[str], list[torch.Tensor]]:
    return lambda device: [
        torch.zeros(n, 3, size, size, device=device),
        torch.zeros(n, dtype=torch.long, device=device),
    ]


def maps(n: int, size: int) -> Callable[[str], list[torch.Tensor]]:
    return lambda device: [
        torch.zeros(n, 3, size, size, device=device),
        torch.zeros(n, size, size, dtype=torch.long, device=device),
    ]


def rows(n: int, width: int) -> Callable[[str], list[torch.Tensor]]:
    return lambda device: [torch.zeros(n, width, device=device), torch.zeros(n, dtype=torch.long, device=device)]


def texts(n: int, length: int) -> Callable[[str], list[torch.Tensor]]:
    return lambda device: [torch.zeros(n, length, dtype=torch.long, device=device)]


def classify(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    scores = model(batch[0])
    return functional.cross_entropy(scores.flatten(0, 1), batch[0].flatten())


SGD = partial(torch.optim.SGD, lr=1e-3)
MOMENTUM = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=1e-4)
ADAMW = partial(torch.optim.AdamW, lr=1e-4)
FUSED = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def _cases() -> Iterator[Case]:
    vision = partial(Case, step=classify)
    text = partial(Case, step=next_token)
    resnet18, resnet50 = partial(resnet, (2, 2, 2, 2), bottleneck=False), partial(resnet, (3, 4, 6, 3), bottleneck=True)
    precisions: tuple[Precision, ...] = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
    for precision in precisions:
        yield vision(
            name=f"mlp, {precision}", build=perceptron, batch=rows(4096, 2048), optimizer=ADAM, precision=precision
        )
        yield vision(
            name=f"resnet50, {precision}", build=resnet50, batch=images(32), optimizer=MOMENTUM, precision=precision
        )
        yield text(
            name=f"gpt2, {precision}", build=LanguageModel, batch=texts(4, 512), optimizer=ADAMW, precision=precision
        )
        yield vision(name=f"vit, {precision}", build=Vit, batch=images(32), optimizer=ADAMW, precision=precision)
    optimizers: dict[str, MakeOptimizer] = {"sgd": SGD, "momentum": MOMENTUM, "adam": ADAM, "fused adamw": FUSED}
    for name, optimizer in optimizers.items():
        yield vision(name=f"alexnet, {name}", build=alexnet, batch=images(64), optimizer=optimizer)
        yield vision(name=f"resnet18, {name}, clipped", build=resnet18, batch=images(64), optimizer=optimizer, clip=1.0)
    yield vision(name="vgg16", build=vgg16, batch=images(16), optimizer=SGD)
    for n in (16, 64, 128):
        yield vision(name=f"mobilenet, batch {n}", build=mobilenet, batch=images(n), optimizer=ADAM)
    for n in (8, 32, 64):
        yield vision(name=f"convnext, batch {n}", build=convnext, batch=images(n), optimizer=ADAMW)
    for n in (2, 8, 16):
        yield vision(name=f"u-net, batch {n}", build=UNet, batch=maps(n, 256), optimizer=ADAM)
    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    for name, kernel in kernels.items():
        gpt = text(
            name=f"gpt2, {name} attention, bf16-true", build=LanguageModel, batch=texts(4, 1024), optimizer=ADAMW
        )
        yield Case(**{**vars(gpt), "precision": "bf16-true", "kernel": kernel})
    efficient = vision(name="vit, efficient attention", build=Vit, batch=images(64), optimizer=SGD)
    yield Case(**{**vars(efficient), "kernel": SDPBackend.EFFICIENT_ATTENTION})
    for kind in ("LSTM", "GRU"):
        yield text(name=kind.lower(), build=partial(Recurrent, kind), batch=texts(32, 128), optimizer=ADAM)


CASES: tuple[Case, ...] = tuple(_cases())
