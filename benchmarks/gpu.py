"""The simulated allocator beside the real one: the same steps on a GPU and, over fake tensors, in a VirtualDevice.

Needs a CUDA device; takes a minute or two, and at most 8 GiB of it.

    python benchmarks/gpu.py

It also times what EmptyCache costs the next step: to ask for memory again. (benchmarks/empty_cache.py does so in a
whole training.) It then compares `estimate_memory` with the GPU, for another 8 minutes at most (see gpu_estimates.py),
times steps with activations in host memory for 2 minutes (see gpu_offload.py), and follows the advice of out-of-memory
reports, for 2 minutes (see gpu_oom.py).
"""

from __future__ import annotations

import argparse
import gc
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gpu_estimates
import gpu_offload
import gpu_oom
import torch
from machine import save, spread
from torch import nn
from torch.nn import functional

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.sizes import GpuShape
from lightning_memtools.simulation.fakes import TensorExchange
from lightning_memtools.simulation.simulated import simulated

STEPS = 3
Case = tuple[nn.Module, torch.Tensor]


class Block(nn.Module):
    """A pre-norm transformer block without dropout in the attention, for which CPU and CUDA take different kernels."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        y: torch.Tensor = x + self.dropout(self.mlp(self.norms[1](x)))
        return y


class LanguageModel(nn.Module):
    """Embedding, blocks, and logits over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, 512)
        self.blocks = nn.Sequential(*(Block(512, 8, 0.1) for _ in range(4)))
        self.head = nn.Linear(512, 8000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


def multilayer_perceptron() -> Case:
    """Linear and ReLU, 1024-4096-4096-1024, batch 2048."""
    layers = (nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return nn.Sequential(*layers), torch.randn(2048, 1024)


def dropouts() -> Case:
    """Linear layers with dropout, whose mask is of bools on CUDA."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers), torch.randn(4096, 2048)


def blocks() -> Case:
    """Three transformer blocks of width 768 on 4 sequences of 256: the host computes them too."""
    return nn.Sequential(*(Block(768, 12, 0.1) for _ in range(3))), torch.randn(4, 256, 768)


def language_model() -> Case:
    """A small language model with its cross entropy, 8 sequences of 512."""
    return LanguageModel(), torch.zeros(8, 512, dtype=torch.int64)


def residual_network() -> Case:
    """Convolutions with batch norm; cuDNN takes workspaces of its own for these."""
    layers = [nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers += [Residual(64) for _ in range(6)] + [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000)]
    return nn.Sequential(*layers), torch.randn(64, 3, 128, 128)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
}
MODELS: dict[str, Callable[[], Case]] = {
    make.__name__: make for make in (multilayer_perceptron, dropouts, blocks, language_model, residual_network)
}
# Those whose kernels take no memory that torch's own operators do not show.
EXACT = ("multilayer_perceptron", "dropouts", "blocks", "language_model")


def train(model: nn.Module, inputs: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Training steps in Lightning's order: zero_grad after forward."""
    for _ in range(STEPS):
        out = model(inputs)
        loss = out if out.ndim == 0 else out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del out, loss


def real_peaks(make: Callable[[], Case], optimizer_name: str) -> dict[str, int]:
    """Peaks of the CUDA caching allocator, from a clean start; workspaces are taken anew."""
    clean_up()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() == 0, "something else holds memory of this process"
    model, inputs = make()
    model, inputs = model.cuda(), inputs.cuda()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    train(model, inputs, optimizer)
    torch.cuda.synchronize()
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "allocated_at_end": torch.cuda.memory_allocated(),
    }


def simulated_peaks(make: Callable[[], Case], optimizer_name: str, workspace: int) -> dict[str, int]:
    """The same of a VirtualDevice over fake tensors, with CUDA's paths substituted."""
    model, inputs = make()
    device, exchange = VirtualDevice(cuda_like=True, cublas_workspace=f"{workspace}B"), TensorExchange()
    device.gpu = gpu_shape()
    with simulated(model, device, exchange, cuda=True):
        inputs = exchange(inputs)
        device.track(inputs)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        train(model, inputs, optimizer)
        stats = device.stats()
    assert stats.peak_allocated is not None
    assert stats.peak_reserved is not None
    assert stats.allocated is not None
    return {
        "peak_allocated": stats.peak_allocated,
        "peak_reserved": stats.peak_reserved,
        "allocated_at_end": stats.allocated,
    }


def gpu_shape() -> GpuShape:
    """The numbers of this GPU that the workspaces of kernels depend on; an A100's where there is none."""
    if not torch.cuda.is_available():
        return GpuShape()
    properties = torch.cuda.get_device_properties(0)
    return GpuShape(properties.multi_processor_count, properties.max_threads_per_multi_processor)


def cublas_workspace() -> int:
    """What cuBLAS takes at the first matrix product, measured."""
    clean_up()
    one = torch.ones(16, 16, device="cuda")
    before = torch.cuda.memory_allocated()
    product = one @ one
    del product
    taken = torch.cuda.memory_allocated() - before
    del one
    return taken


def asking_again() -> dict[str, Any]:
    """What EmptyCache gives back has to be asked for again: how long that takes, and giving it back, in ms.

    A step allocates 2 GiB in segments of one size and frees them. It is timed with segments that are kept, and right
    after the cache was emptied; in between the device is waited for, as it is at the end of an evaluation.
    """
    found = {}
    for mib in (20, 64, 256):
        sizes = [mib * 2**20] * (2048 // mib)
        kept, emptied, asked = [], [], []
        for _ in range(21):
            timed_allocations(sizes)  # so that there is something to keep
            kept.append(timed_allocations(sizes))
            begin = time.perf_counter()
            torch.cuda.empty_cache()
            emptied.append(1000 * (time.perf_counter() - begin))
            asked.append(timed_allocations(sizes))
        clean_up()
        found[f"{len(sizes)} segments of {mib} MiB"] = {
            "kept_ms": spread(kept),
            "empty_cache_ms": spread(emptied),
            "asked_again_ms": spread(asked),
            "longer_by_ms_per_gib": (statistics.median(asked) - statistics.median(kept)) / 2,
        }
    return found


def timed_allocations(sizes: list[int]) -> float:
    """Milliseconds to allocate blocks of these sizes, all at once; they are freed again."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    elapsed_ms = 1000 * (time.perf_counter() - begin)
    del blocks
    return elapsed_ms


def clean_up() -> None:
    """Drop what earlier runs left: garbage, cuBLAS workspaces, cached blocks."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def percent(simulated: int, real: int) -> float:
    """How much larger the simulated figure is, in percent of the real one."""
    return round(100 * (simulated - real) / real, 3)


def compare(name: str, optimizer_name: str, workspace: int) -> dict[str, Any]:
    """Real and simulated peaks of one model, and their differences.

    ``peak_allocated_without_workspaces`` leaves out what cuBLAS takes in forward and in backward: harder to meet.
    """
    torch.manual_seed(0)
    real = real_peaks(MODELS[name], optimizer_name)
    simulated = simulated_peaks(MODELS[name], optimizer_name, workspace)
    for peaks in (real, simulated):
        peaks["peak_allocated_without_workspaces"] = peaks["peak_allocated"] - 2 * workspace
    return {
        "real": real,
        "simulated": simulated,
        "difference_pct": {figure: percent(simulated[figure], real[figure]) for figure in real},
    }


def driver() -> str:
    """The driver's version, from nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-estimates", action="store_true", help="leave gpu_estimates.py out")
    parser.add_argument("--without-offload", action="store_true", help="leave gpu_offload.py out")
    parser.add_argument("--without-reports", action="store_true", help="leave gpu_oom.py out")
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py compares with a real GPU, and there is no CUDA device here: nothing measured.")
        return 1
    workspace = cublas_workspace()
    measured = {
        f"{name}, {optimizer_name}": {"what": MODELS[name].__doc__, **compare(name, optimizer_name, workspace)}
        for name in chosen.models
        for optimizer_name in OPTIMIZERS
    }
    device = torch.cuda.get_device_name()
    properties = torch.cuda.get_device_properties(0)
    versions = {
        "device": device,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "total_memory": properties.total_memory,
        "driver": driver(),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "cublas_workspace": workspace,
        "steps": STEPS,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower())
    save(f"gpu-{slug}", {"gpu": versions, "models": measured, "asking_again": asking_again()})
    if not chosen.without_estimates:
        save(f"gpu_estimates-{slug}", gpu_estimates.measure())
    if not chosen.without_offload:
        save(f"gpu_offload-{slug}", gpu_offload.measure())
    if not chosen.without_reports:
        save(f"gpu_oom-{slug}", gpu_oom.measure())
    return 0


if __name__ == "__main__":
    sys.exit(main())
