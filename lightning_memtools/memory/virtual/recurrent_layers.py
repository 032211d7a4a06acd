"""Recurrent layers take cuDNN's memory on a simulated device; their numbers are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_memtools._torch import LAYER_FUNCTIONS, FakeTensor, is_functorch_active
from lightning_memtools.memory.cuda_ops.recurrent import KINDS, run_like_cudnn
from lightning_memtools.memory.virtual.patches import Patches

if TYPE_CHECKING:
    from lightning_memtools.memory.virtual.accounting_mode import AccountingMode

_PLAIN = {Tensor, torch.nn.Parameter}


def run_recurrent_like_cuda(patches: Patches, find: Callable[[], AccountingMode | None]) -> None:
    """Replace the functions that torch's recurrent layers call."""

    def make(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(source: Tensor, *args: Any) -> Any:
            mode = find()
            if mode is None or mode.silent or is_functorch_active() or not source.is_cpu:
                return original(source, *args)
            if isinstance(source, FakeTensor):
                return run_like_cudnn(kind, source, *args)
            if type(source) not in _PLAIN:
                return original(source, *args)
            return run_like_cudnn(kind, source, *args, original=original, uncounted=mode.silence)

        return run

    for name, kind in KINDS.items():
        patches.replace(LAYER_FUNCTIONS, name, partial(make, kind))
