"""PyTorch's CUDA caching allocator, simulated in plain Python: no torch, no device, no real memory."""

from __future__ import annotations

from lightning_memtools.memory.allocator.blocks import Block, Segment
from lightning_memtools.memory.allocator.caching import CachingAllocator
from lightning_memtools.memory.allocator.config import AllocatorConfig
from lightning_memtools.memory.allocator.errors import SimulatedOutOfMemory

__all__ = ["AllocatorConfig", "Block", "CachingAllocator", "Segment", "SimulatedOutOfMemory"]
