"""What of a capacity is left for the allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from lightning_memtools.memory.capacity import find_gpu, parse_capacity
from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.memory.virtual.device import DEFAULT_CONTEXT

# Compute capabilities 9, 10 and 12, for which cuBLAS gets 32 MiB (see memory/allocator/cublas.py).
_LARGE_WORKSPACE = ("H20", "H100", "H200", "H800", "GH200", "B100", "B200", "B300", "GB200", "RTX 50", "RTX PRO")


@dataclass(frozen=True, slots=True)
class Limit:
    """A device's capacity in bytes, and what of it the CUDA context takes."""

    capacity: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a size, or a GPU's name, of which the context takes 500 MiB as in `VirtualDevice`.

        Raises:
            ValueError: It is neither.
        """
        return cls(parse_capacity(text), 0 if find_gpu(text) is None else parse_size(DEFAULT_CONTEXT))

    @property
    def usable(self) -> int:
        """Bytes for the allocator."""
        return self.capacity - self.context


def cublas_workspace_of(capacity: str | None) -> str:
    """The size of a cuBLAS workspace on a GPU given by its name; that of GPUs older than Hopper for anything else."""
    gpu = None if capacity is None else find_gpu(capacity)
    return "32MiB" if gpu is not None and gpu.name.startswith(_LARGE_WORKSPACE) else "8519680B"
