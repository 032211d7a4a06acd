"""Finds the lines of a training step that make the host wait for the GPU, such as `.item()`, by watching one step."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_memtools.memory.user_code import short_path

_SAYS = "called a synchronizing CUDA operation"  # torch/csrc, c10/cuda/CUDAFunctions.cpp: warn_or_error_on_sync
_METHOD = "training_step"


def watch_next_step(module: nn.Module) -> tuple[list[str], Callable[[], None]]:
    """Watch the next call of the module's training_step, and find the lines of code that wait for the GPU.

    PyTorch's sync debug mode warns of each wait. These warnings are collected; all other warnings appear as usual.

    Returns:
        A list of lines, such as "train.py:31", that is filled during that step; and a function that stops watching.
    """
    places: list[str] = []
    step = getattr(module, _METHOD)

    def stop() -> None:
        if vars(module).get(_METHOD) is watched:
            del vars(module)[_METHOD]

    @functools.wraps(step)
    def watched(*args: Any, **options: Any) -> Any:
        stop()
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                returned = step(*args, **options)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for each in caught:
            if _SAYS in str(each.message):
                places.append(f"{short_path(each.filename)}:{each.lineno}")
            elif "Synchronization debug mode" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return returned

    if _METHOD not in vars(module):
        vars(module)[_METHOD] = watched
    return places, stop
