"""What CUDA's kernels allocate where those for the CPU allocate something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Kernel = Callable[[Any, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
KERNELS: dict[Any, Kernel] = {}
