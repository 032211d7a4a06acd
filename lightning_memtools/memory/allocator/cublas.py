"""The workspace that PyTorch gives cuBLAS, from the caching allocator, at the first matrix product on a stream.

Sizes as in aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.13.
"""

from __future__ import annotations

import re

from lightning_memtools.memory.sizes import KIB, MIB

_DEFAULT = 2 * 4096 * KIB + 8 * 16 * KIB  # 8,519,680 B: what ":4096:2:16:8" says
_DEFAULT_OF_LARGE_GPUS = 32 * MIB
# Major compute capabilities: Hopper, and Blackwell in data centres and in desktops.
_LARGE_GPUS = frozenset({9, 10, 12})
_CONFIG = re.compile(r"(?::\d+:\d+)+")


def cublas_workspace_bytes(*, compute_capability: tuple[int, int] | None = None, config: str = "") -> int:
    """Return the size of the workspace that a cuBLAS handle gets on each stream, in bytes.

    Args:
        compute_capability: The GPU's compute capability, such as (9, 0) for an H100; None for a GPU before Hopper.
        config: The value of the environment variable CUBLAS_WORKSPACE_CONFIG: pairs of a size in KiB and a count,
            such as ":4096:2:16:8". If it is empty or malformed, torch uses its default.
    """
    if _CONFIG.fullmatch(config):
        return sum(int(size) * KIB * int(count) for size, count in re.findall(r":(\d+):(\d+)", config))
    if compute_capability is not None and compute_capability[0] in _LARGE_GPUS:
        return _DEFAULT_OF_LARGE_GPUS
    return _DEFAULT
