"""A GPU's memory without a GPU."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory
from lightning_memtools.memory.capacity import parse_capacity
from lightning_memtools.memory.sizes import format_size, parse_size
from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.memory.virtual import surroundings
from lightning_memtools.memory.virtual.attribution import attribute
from lightning_memtools.memory.virtual.categories import Category, Composition, as_log_names, by_name
from lightning_memtools.memory.virtual.ledger import Ledger
from lightning_memtools.memory.virtual.loaders import count_batch, watch_loaders
from lightning_memtools.memory.virtual.mode import OUTSIDE, AccountingMode
from lightning_memtools.memory.virtual.names import ModuleNames
from lightning_memtools.memory.virtual.oom import cuda_error
from lightning_memtools.memory.virtual.parts import tensors_in
from lightning_memtools.memory.virtual.patches import Patches
from lightning_memtools.memory.virtual.substitutions import behave_like_cuda
from lightning_memtools.memory.virtual.summary import summary_table

OomObserver = Callable[[int, int, int, int], object]
"""Called with device index, bytes asked for, the device's bytes in all, and its free bytes, as torch's CUDA observer."""
