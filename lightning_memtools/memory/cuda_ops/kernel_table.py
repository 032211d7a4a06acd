"""All kernels of CUDA that differ from the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from lightning_memtools.memory.cuda_ops import attention_kernels, convolutions, lookups, losses, normalizations
from lightning_memtools.memory.cuda_ops.kernels import GPU_KERNELS, KERNELS
from lightning_memtools.memory.cuda_ops.reductions import reduction_kernels
from lightning_memtools.memory.sizes import GpuShape

_REGISTERED = (attention_kernels, convolutions, lookups, losses, normalizations)  # by being imported


@cache
def kernels_on(gpu: GpuShape) -> dict[Any, Callable[..., Any]]:
    """Return the kernels to call in place of their operators."""
    return {**KERNELS, **reduction_kernels(gpu), **{op: partial(one, gpu=gpu) for op, one in GPU_KERNELS.items()}}
