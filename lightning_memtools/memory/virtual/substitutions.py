"""Where torch takes another path on CPU tensors than on CUDA tensors, and can be led along the latter."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.optim import optimizer, swa_utils
from torch.utils import _foreach_utils

from lightning_memtools.memory.virtual.patches import Patches


def behave_like_cuda(patches: Patches) -> None:
    """Dropout keeps a mask of bools, and optimizers use their foreach implementation unless told otherwise.

    On CPU tensors, dropout keeps its mask in the input's type and draws other random numbers for it, and optimizers
    update one parameter after the other. So a run with these differs from one without by its dropout masks, and by
    rounding.
    """

    def make_dropout(original: Any) -> Any:
        def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002, torch's name
            # The condition of is_fused_kernel_acceptable in ATen/native/Dropout.cpp.
            if train and 0 < p < 1 and input.numel() > 0:
                return torch.native_dropout(input, p, train)[0]
            out: torch.Tensor = original(input, p, train)
            return out

        return dropout

    patches.replace(torch, "dropout", make_dropout)
    patches.replace(torch._VF, "dropout", make_dropout)
    for module in (optimizer, _foreach_utils, swa_utils):
        patches.replace(module, "_get_foreach_kernels_supported_devices", lambda original: lambda: [*original(), "cpu"])
    for module in (optimizer, _foreach_utils):
        patches.replace(module, "_foreach_supported_types", lambda original: [*original, FakeTensor])
