"""The models that gradient checkpointing is measured on, and what their steps are."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.memory_model import ChainPlan
from lightning_memtools.memory.cuda_ops.functions import CudaFunctions
from lightning_memtools.memory.sizes import GpuShape
from lightning_memtools.simulation.fakes import TensorExchange, borrowed, fake_mode
from lightning_memtools.simulation.step_trace import TracedStep
from tests.zoo import torchvision_models

Plans = Sequence[ChainPlan]


class Block(nn.Module):
    """A pre-norm transformer block of width 256 with 8 heads."""

    def __init__(self, dropout: float, activation: str) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(256, 8, 1024, dropout, activation, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


def encoder(depth: int, dropout: float, activation: str = "gelu") -> nn.Sequential:
    return nn.Sequential(*[Block(dropout, activation) for _ in range(depth)])


def step_of(model: nn.Module, shape: Sequence[int], *, adamw: bool = False) -> TracedStep:
    optimizers = (torch.optim.AdamW(model.parameters()),) if adamw else ()
    return TracedStep(model, (torch.empty(*shape),), lambda copy, args: copy(*args), optimizers, device="cuda")


def flops(model: nn.Module, shape: Sequence[int], plans: Plans) -> int:
    """FLOPs of one step by torch's own counter, in a pass of its own: it keeps recomputed tensors alive."""
    with fake_mode(), borrowed([model], TensorExchange()):
        x = torch.empty(*shape)
        with CudaFunctions(GpuShape()), AppliedPlan(model, plans), FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
    return int(counter.get_total_flops())


def conv_bn(depth: int = 12) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


def unequal() -> nn.Sequential:
    widths = [64, 2048, 32, 512, 512, 4096, 16, 1024, 128, 3072, 64, 256, 2048, 8, 640, 64]
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), nn.GELU()]
    return nn.Sequential(*layers)


def mlp() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))])


def frontier_models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    zoo = torchvision_models()
    return {
        "MLP": (mlp(), (4096, 512)),
        "VGG-16 features": (zoo.vgg16().features, (16, 3, 224, 224)),
        "AlexNet": (zoo.alexnet(), (64, 3, 224, 224)),
        "conv-BN net": (conv_bn(), (16, 3, 64, 64)),
        "encoder": (encoder(12, 0.1), (32, 128, 256)),
        "ResNet-50": (zoo.resnet50(), (16, 3, 224, 224)),
        "MobileNetV2": (zoo.mobilenet_v2(), (16, 3, 224, 224)),
        "unequal chain": (unequal(), (4096, 64)),
        # checkpoint_sequential fails at most chunk counts of these two as they are: so once more as it can take them.
        "VGG-16, no in-place": (not_in_place(zoo.vgg16().features), (16, 3, 224, 224)),
        "AlexNet, no in-place": (not_in_place(zoo.alexnet()), (64, 3, 224, 224)),
    }


def not_in_place(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model
