"""All kernels of CUDA that differ from the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_memtools.simulation.cuda_ops import attention_kernels, convolutions, lookups, losses, normalizations
from lightning_memtools.simulation.cuda_ops.kernels import GPU_KERNELS, KERNELS, GpuShape
from lightning_memtools.simulation.cuda_ops.reductions import reduction_kernels

_REGISTERED = (attention_kernels, convolutions, lookups, losses, normalizations)  # by being imported


def kernels_on(gpu: GpuShape) -> dict[Any, Callable[..., Any]]:
    """Return the kernels to call in place of their operators."""
    return {**KERNELS, **reduction_kernels(gpu), **{op: partial(one, gpu=gpu) for op, one in GPU_KERNELS.items()}}
