"""PyTorch's CUDA caching allocator, simulated in plain Python: no torch, no device, no real memory."""

from __future__ import annotations

from lightning_memtools.memory.allocator.blocks import Block, Segment
from lightning_memtools.memory.allocator.caching import CachingAllocator
from lightning_memtools.memory.allocator.config import AllocatorConfig
from lightning_memtools.memory.allocator.copying import copy_of
from lightning_memtools.memory.allocator.cublas import CublasWorkspaces, cublas_workspace_bytes
from lightning_memtools.memory.allocator.errors import SimulatedOutOfMemory
from lightning_memtools.memory.allocator.replay import Replay, replay
from lightning_memtools.memory.allocator.snapshot import History, save_snapshot, take_snapshot, write_snapshot
from lightning_memtools.memory.allocator.trace import Trace

__all__ = [
    "AllocatorConfig",
    "Block",
    "CachingAllocator",
    "CublasWorkspaces",
    "History",
    "Replay",
    "Segment",
    "SimulatedOutOfMemory",
    "Trace",
    "copy_of",
    "cublas_workspace_bytes",
    "replay",
    "save_snapshot",
    "take_snapshot",
    "write_snapshot",
]
