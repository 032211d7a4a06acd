"""PyTorch's CUDA caching allocator, simulated in plain Python: no torch, no device, no real memory."""

from __future__ import annotations

from lightning_memtools.memory.allocator.allocation_trace import AllocationTrace
from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig
from lightning_memtools.memory.allocator.blocks import Block, Segment
from lightning_memtools.memory.allocator.caching_allocator import CachingAllocator, copy_of
from lightning_memtools.memory.allocator.cublas import cublas_workspace_bytes
from lightning_memtools.memory.allocator.memory_snapshot import AllocatorHistory, take_snapshot, write_snapshot
from lightning_memtools.memory.allocator.simulated_oom import SimulatedOutOfMemory
from lightning_memtools.memory.allocator.trace_replay import ReplayedTrace, replay, replay_on

__all__ = [
    "AllocationTrace",
    "AllocatorConfig",
    "AllocatorHistory",
    "Block",
    "CachingAllocator",
    "ReplayedTrace",
    "Segment",
    "SimulatedOutOfMemory",
    "copy_of",
    "cublas_workspace_bytes",
    "replay",
    "replay_on",
    "take_snapshot",
    "write_snapshot",
]
