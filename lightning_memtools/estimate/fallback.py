"""When a step cannot run on fake tensors: why, and what is done instead."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from lightning_memtools.estimate.reading import read_estimate
from lightning_memtools.estimate.resizing import first_rows
from lightning_memtools.estimate.result import MemoryEstimate
from lightning_memtools.estimate.step import Recipe, batch_size_of
from lightning_memtools.estimate.tracing import Settings, Subject, trace_on_cpu


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a step cannot run on fake tensors: in words, with the line of the user's code."""

    why: str


def explain(error: Exception) -> Obstacle | None:
    """Say why a step failed, if it is because its tensors are fake; None for an error of the user's own."""
    where = _line_of_user(error)
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        what = str(error.func)
        return Obstacle(f"The step reads values at {where}: {what} needs them, and an estimate has none.")
    if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
        name = str(getattr(error, "func", None) or error).split("\n")[0]
        return Obstacle(
            f"The operator {name} at {where} has no kernel for fake tensors. Register one with "
            "torch.library.register_fake, and the estimate needs no extrapolation."
        )
    text = str(error)
    if isinstance(error, RuntimeError) and (".numpy() is not supported" in text or "with FakeTensor" in text):
        return Obstacle(f"The step takes values out of a tensor at {where}: {text.splitlines()[0]}")
    return None


def estimate_on_cpu(
    subject: Subject,
    batch: Any,
    recipe: Recipe,
    settings: Settings,
    obstacle: Obstacle,
    *,
    capacity: str | None,
    retrace: Callable[[int], MemoryEstimate],
) -> MemoryEstimate:
    """Run a copy of the model on real CPU tensors at two small batch sizes, and draw a line through their peaks.

    Raises:
        RuntimeError: The model or the batch has no values either, or the batch cannot be made smaller.
    """
    raise RuntimeError(obstacle.why)


def _line_of_user(error: Exception) -> str:
    """The innermost line that is neither torch's, Lightning's, Python's nor this library's."""
    library = str(Path(__file__).parents[1])
    installed = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], library, "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(installed)]
    if not frames:
        return "an unknown line"
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.line})"
