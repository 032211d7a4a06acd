"""The simulation beside PyTorch's own CUDA allocator and code: every allocation, in its order and size.

A sample of benchmarks/truth.py, whose whole sweep is in benchmarks/results/truth.json.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.zoo import timm, torchvision_models

pytestmark = pytest.mark.cuda_memory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FLOAT, INT = torch.float32, torch.int64


class Turned(nn.Module):
    """A module whose input is transposed first, so that it is not contiguous."""

    def __init__(self, module, one, other):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.module, self.dims = module, (one, other)

    def forward(self, x):
        return self.module((x * self.scale).transpose(*self.dims))


class Scaled(nn.Module):
    """A function of the input times a parameter, so that it has a gradient."""

    def __init__(self, function):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.function = function

    def forward(self, x):
        return self.function(x * self.scale)


class RunAgain(nn.Module):
    """A module that runs again in the backward pass."""

    def __init__(self, module):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x * self.scale, use_reentrant=False)


def attend(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def log_softmax():
    return nn.Sequential(nn.Linear(8, 8192, bias=False), nn.LogSoftmax(-1))


def two_layers():
    return nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))


def images(shape=(4, 16, 64, 64)):
    return {"x": (shape, FLOAT)}


# How the module is made, its input, and other settings; one for each rule of memory/cuda_ops.
KERNELS = {
    "contiguous layer norm": (partial(nn.LayerNorm, 512), {"x": ((8, 64, 512), FLOAT)}, {}),
    "few indices": (partial(nn.Embedding, 10_000, 128), {"x": ((3072,), INT)}, {}),
    "plain convolution": (partial(nn.Conv2d, 16, 16, 3, padding=1, bias=False), images(), {}),
    "one-dimensional loss": (partial(nn.Linear, 64, 8), {"x": ((32, 64), FLOAT)}, {}),
    "flash attention": (lambda: Scaled(attend), images((2, 4, 200, 64)), {"precision": "bf16-true"}),
    "efficient attention": (lambda: Scaled(attend), images((2, 4, 200, 64)), {}),
    "wide efficient attention": (
        lambda: Scaled(lambda x: F.scaled_dot_product_attention(x, x, x, x.new_zeros(256, 256))),
        images((2, 4, 256, 128)), {"precision": "bf16-true"},
    ),
    "softmax": (lambda: Scaled(lambda x: x.transpose(1, 2).softmax(-1)), {"x": ((8, 64, 512), FLOAT)}, {}),
    "rms norm": (lambda: Scaled(nn.RMSNorm(512)), {"x": ((8, 64, 512), FLOAT)}, {}),
    "scaled loss": (partial(nn.Linear, 700, 900), {"x": ((4, 700), FLOAT)}, {"precision": "16-mixed"}),
    "buffers of a bias gradient": (partial(nn.Linear, 64, 4096), {"x": ((2048, 64), FLOAT)}, {}),
    "gradients that meet": (lambda: Scaled(lambda x: (x + x * 3.0) * 5.0), {"x": ((256, 1024), FLOAT)}, {}),
    "dropout": (lambda: Scaled(nn.Dropout(0.5)), {"x": ((256, 1024), FLOAT)}, {}),
    "layer norm of halves": (partial(nn.LayerNorm, 64), {"x": ((4096, 64), FLOAT)}, {"precision": "bf16-true"}),
    "batch norm of halves": (lambda: Scaled(nn.BatchNorm2d(16)), images(), {"precision": "bf16-true"}),
    "GRU cell": (partial(nn.GRUCell, 32, 256), {"x": ((128, 32), FLOAT)}, {}),
    "LSTM cell": (partial(nn.LSTMCell, 32, 256), {"x": ((128, 32), FLOAT)}, {}),
    "log sigmoid": (lambda: Scaled(nn.LogSigmoid()), {"x": ((128, 256), FLOAT)}, {}),
    "log softmax of float16": (log_softmax, {"x": ((512, 8), FLOAT)}, {"precision": "16-mixed"}),
    "log softmax of bfloat16": (log_softmax, {"x": ((512, 8), FLOAT)}, {"precision": "bf16-mixed"}),
    "half copies of weights": (two_layers, {"x": ((8, 512), FLOAT)}, {"precision": "bf16-mixed"}),
    "foreach optimizer": (partial(nn.Linear, 2048, 2048), {"x": ((1, 2048), FLOAT)}, {"optimizer": "Adam"}),
    "fused optimizer": (partial(nn.Linear, 2048, 2048), {"x": ((1, 2048), FLOAT)}, {"optimizer": "AdamW fused"}),
}  # fmt: skip


# Rules of which only the forward pass is simulated.
IN_VALIDATION = {
    "strided layer norm": (lambda: Turned(nn.LayerNorm(64), 1, 2), {"x": ((8, 64, 512), FLOAT)}),
    "bag of embeddings": (partial(nn.EmbeddingBag, 5000, 128), {"x": ((256, 32), INT)}),
}


def unfused(heads=4, mask=None, **options):
    def attend_in_parts(x):
        given = None if mask is None else torch.ones(x.shape[-2], x.shape[-2], dtype=mask, device=x.device)
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(x, x[:, :heads], x[:, :heads], given, **options)

    return lambda: Scaled(attend_in_parts)


# Attention that no fused kernel takes: torch computes halves in float32, and casts the result back.
UNFUSED = {
    "plain": unfused(),
    "causal, dropout": unfused(is_causal=True, dropout_p=0.1),
    "a bool mask, dropout": unfused(mask=torch.bool, dropout_p=0.1),
    "grouped queries, a mask": unfused(2, mask=torch.bool, enable_gqa=True),
    "one key for all queries, a mask, dropout": unfused(1, mask=FLOAT, dropout_p=0.1),
}
KERNELS |= {
    f"unfused attention, {name}, {precision}": (build, images((2, 4, 72, 40)), {"precision": precision})
    for name, build in UNFUSED.items()
    for precision in ("32-true", "bf16-mixed")
}

# The reserve space of recurrent layers is an assumption that both make.
SEQUENCES = {"x": ((16, 24, 64), FLOAT)}
LSTM = partial(nn.LSTM, 64, 128, 2, batch_first=True)
RECURRENT = {
    "long short-term memory": (LSTM, SEQUENCES, {}),
    "after a transposition": (lambda: Turned(nn.GRU(24, 128, batch_first=True), 1, 2), SEQUENCES, {}),
    "run again": (lambda: RunAgain(LSTM()), SEQUENCES, {}),
    "mixed with bfloat16": (LSTM, SEQUENCES, {"precision": "bf16-mixed"}),
}
KERNELS |= RECURRENT

MODELS = {
    "torchvision's ResNet-18": (lambda: torchvision_models().resnet18(), {"optimizer": "AdamW", "clip": 1.0}),
    "torchvision's ResNet-18, mixed": (
        lambda: torchvision_models().resnet18(), {"precision": "bf16-mixed", "optimizer": "Adam", "channels_last": True}
    ),
    "timm's ViT": (
        lambda: timm().create_model("vit_tiny_patch16_224"), {"precision": "16-mixed", "optimizer": "AdamW fused"}
    ),
    "torchvision's ConvNeXt": (
        lambda: torchvision_models().convnext_tiny(), {"optimizer": "AdamW", "accumulate": 2}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def truth():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("truth")
    finally:
        sys.path.remove(str(BENCHMARKS))


def case_of(truth, build, inputs, settings):
    return truth.TruthCase(name="case", source="test", build=build, inputs=inputs, **settings)


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("name", KERNELS)
def test_every_allocation_is_that_of_cuda(truth, name):
    case = case_of(truth, *KERNELS[name])
    real, (_, simulated) = truth.real_trace(case), truth.estimated(case)
    assert [one.size for one in simulated] == [one.size for one in real], truth.differences(real, simulated)[:3]
    assert [one.allocated for one in simulated] == [one.allocated for one in real]


@pytest.mark.parametrize("name", IN_VALIDATION)
def test_peaks_of_evaluation_are_those_of_cuda(truth, name):
    case = case_of(truth, *IN_VALIDATION[name], {"stage": "val"})
    real, (made, _) = truth.real_peaks(case), truth.estimated(case)
    assert (made["allocated"], made["reserved"]) == (real["allocated"], real["reserved"])


@pytest.mark.parametrize("name", MODELS)
def test_peaks_of_models_are_those_of_cuda(truth, name):
    build, settings = MODELS[name]
    inputs = {"x": ((4, 3, 224, 224), FLOAT), "target": ((4,), INT)}
    case = case_of(truth, build, inputs, settings)
    real, (made, _) = truth.real_peaks(case), truth.estimated(case)
    assert (made["allocated"], made["reserved"]) == (real["allocated"], real["reserved"])
