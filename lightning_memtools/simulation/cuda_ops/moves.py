"""A step's own moves to the GPU: in an estimate everything is there already."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class AlreadyOnCuda(TorchFunctionMode):
    """While entered, `.cuda()`, `.to("cuda")` and `device="cuda"` mean the tensors that stand for CUDA's.

    Those are on the CPU (see `autocast`), and a build of torch without CUDA would refuse to move them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or leave out what it would move."""
        if func is torch.Tensor.cuda:
            return args[0]
        if func is not torch.device and (_names_cuda(*args) or (kwargs and _names_cuda(kwargs.get("device")))):
            args = tuple("cpu" if _names_cuda(one) else one for one in args)
            kwargs = {name: "cpu" if _names_cuda(value) else value for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _names_cuda(*things: Any) -> bool:
    return any(
        thing.type == "cuda" if isinstance(thing, torch.device) else isinstance(thing, str) and thing[:4] == "cuda"
        for thing in things
    )
