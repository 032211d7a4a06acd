"""The workspace that PyTorch gives cuBLAS, from the caching allocator, at the first matrix product on a stream.

Sizes as in aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.13.
"""

from __future__ import annotations

import re

from lightning_memtools.memory.allocator.blocks import Block
from lightning_memtools.memory.allocator.caching_allocator import CachingAllocator
from lightning_memtools.memory.sizes import KIB, MIB

_DEFAULT = 2 * 4096 * KIB + 8 * 16 * KIB  # 8,519,680 B: what ":4096:2:16:8" says
_DEFAULT_OF_LARGE_GPUS = 32 * MIB
# Major compute capabilities: Hopper, and Blackwell in data centres and in desktops.
_LARGE_GPUS = frozenset({9, 10, 12})
_CONFIG = re.compile(r"(?::\d+:\d+)+")


def cublas_workspace_bytes(*, compute_capability: tuple[int, int] | None = None, config: str = "") -> int:
    """Return the size of the workspace that a cuBLAS handle gets on each stream, in bytes.

    Args:
        compute_capability: That of the GPU, such as (9, 0) for an H100. Left out: one older than Hopper.
        config: As the environment variable CUBLAS_WORKSPACE_CONFIG: pairs of a size in KiB and a count, such as
            ":4096:2:16:8". Empty for torch's default.

    Raises:
        ValueError: ``config`` is not of that form. (torch would warn and use its default.)
    """
    if config:
        if not _CONFIG.fullmatch(config):
            raise ValueError(
                f"Bad cuBLAS workspace config {config!r}: write pairs of a size in KiB and a count, "
                'such as ":4096:8" or ":4096:2:16:8".'
            )
        return sum(int(size) * KIB * int(count) for size, count in re.findall(r":(\d+):(\d+)", config))
    if compute_capability is not None and compute_capability[0] in _LARGE_GPUS:
        return _DEFAULT_OF_LARGE_GPUS
    return _DEFAULT


class CublasWorkspaces:
    """The workspaces allocated so far: one per handle and stream, kept until `clear`.

    cuBLASLt uses the same ones, unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0 is set, which is not simulated.

    Args:
        allocator: The allocator that they come from.
        n_bytes: The size of each: see `cublas_workspace_bytes`.
    """

    def __init__(self, allocator: CachingAllocator, n_bytes: int) -> None:
        self._allocator = allocator
        self._n_bytes = n_bytes
        self._blocks: dict[tuple[int, int], Block] = {}

    def on_matmul(self, *, handle: int = 0, stream: int = 0) -> None:
        """Record that a matrix product runs: the first one of a handle on a stream allocates its workspace.

        Args:
            handle: The number of the cuBLAS handle; torch has one per thread and device.
            stream: The stream it runs on.

        Raises:
            SimulatedOutOfMemory: There is no memory for it.
        """
        key = (handle, stream)
        if key not in self._blocks:
            self._blocks[key] = self._allocator.malloc(self._n_bytes, stream=stream, label="cuBLAS workspace")

    def clear(self) -> None:
        """Free all workspaces (torch._C._cuda_clearCublasWorkspaces)."""
        for block in self._blocks.values():
            self._allocator.free(block)
        self._blocks.clear()
