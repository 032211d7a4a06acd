"""Functions that choose their kernels by device: while entered they choose as for CUDA."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class CudaFunctions(TorchFunctionMode):
    """Chooses attention's kernels as on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or what CUDA calls in its place."""
        return func(*args, **(kwargs or {}))
