"""What is known when memory runs out. Captured in the middle of the failing step, so it allocates nothing there."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in
from lightning_memtools.memory.processes import GpuProcess
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.oom.split import Split

MOST_TENSORS = 12


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the run was.

    Attributes:
        stage: setup, sanity check, train, val, test or predict.
        step: The training step, counted as the x axis of `self.log` counts.
        batch_idx: The batch within its epoch or evaluation; None outside of batches.
        phase: Within a training batch forward, backward or optimizer step; empty elsewhere.
        rank: This process among all.
        world_size: How many processes train.
    """

    stage: str
    step: int = 0
    batch_idx: int | None = None
    phase: str = ""
    rank: int = 0
    world_size: int = 1

    def __str__(self) -> str:
        parts = [self.stage]
        if self.stage == "train":
            parts.append(f"step {self.step}")
        if self.batch_idx is not None:
            parts.append(f"batch {self.batch_idx}")
        if self.phase:
            parts.append(self.phase)
        if self.world_size > 1:
            parts.append(f"rank {self.rank} of {self.world_size}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Growth:
    """What has come together over the batches of a stage, beside model, gradients and optimizer state.

    Attributes:
        n_bytes: How much, in bytes.
        n_batches: In how many batches.
    """

    n_bytes: int
    n_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was known when memory ran out; plain data that holds no tensor of the device. Sizes in bytes.

    Attributes:
        moment: Where the run was.
        device: The device's name.
        simulated: Whether it is a simulated one.
        stats: Its statistics; those that are not known are None.
        requested: What was asked of it; None where that is not known.
        free: What it had left; None where that is not known.
        used_by_others: What others than the allocator hold: other processes, and the context of this one.
        fraction: The share of the device that this process may reserve (`torch.cuda.set_per_process_memory_fraction`).
        split: What the allocated bytes are for; None where nothing is known of them.
        grown: What has come together over the batches; None where that is little, or not known.
        module: The innermost module that was being called; "" where that is not known.
        batch: The batch on the meta device: sizes without values; None where there was none.
        is_own_batch: Whether this is the failing batch itself; else it is the stage's first.
        problem: What went wrong while this was captured.
    """

    moment: Moment
    device: str
    simulated: bool = False
    stats: MemoryStats = field(default_factory=MemoryStats)
    requested: int | None = None
    free: int | None = None
    used_by_others: int | None = None
    fraction: float = 1.0
    split: Split | None = None
    grown: Growth | None = None
    module: str = ""
    batch: Any = None
    is_own_batch: bool = True
    problem: str = ""

    @property
    def unusable(self) -> int | None:
        """Reserved and free, but in pieces: what is whole went back to the device before the error was raised."""
        if self.stats.reserved is None or self.stats.allocated is None:
            return None
        return self.stats.reserved - (self.stats.active or self.stats.allocated)

    @property
    def samples(self) -> int | None:
        """The batch's first dimension."""
        return next((tensor.shape[0] for tensor in tensors_in(self.batch) if tensor.dim()), None)


def sizes_only(batch: Any) -> Any:
    """A batch with every tensor replaced by one of the meta device: the same shape, without memory or values."""

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return map_tensors(batch, meta)


def describe_batch(batch: Any) -> list[str]:
    """One line per tensor: its type, shape and size."""
    tensors = list(tensors_in(batch))
    lines = [
        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        f" ({format_size(tensor.numel() * tensor.element_size())})"
        for tensor in tensors[:MOST_TENSORS]
    ]
    if len(tensors) > MOST_TENSORS:
        lines.append(f"and {len(tensors) - MOST_TENSORS} more")
    return lines


def running_module(model: nn.Module) -> str:
    """The name and class of the innermost module that this thread is calling; "" outside of all."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame in _frames_of_calls():
        # These frames end with the error, so what looking at their variables keeps alive ends with it too. That is not
        # so of the user's frames, which may catch the error and go on.
        module = frame.f_locals.get("self")
        name = names.get(id(module))
        if name is not None:
            return f"{name or '(the model)'} ({type(module).__name__})"
    return ""


def _frames_of_calls() -> Iterator[FrameType]:
    code: Any = getattr(nn.Module._call_impl, "__code__", None)  # noqa: SLF001, what runs whenever a module is called
    frame: FrameType | None = sys._getframe()  # noqa: SLF001, the only way to the callers without their variables
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back


def line_of_user(error: BaseException) -> str:
    """The innermost line in an error's traceback that belongs to no library; "" where there is none."""
    installed = (
        str(Path(torch.__file__).parents[1]),
        str(Path(traceback.__file__).parent),
        str(Path(__file__).parents[1]),
        "<",
    )
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(installed)]
    if not frames:
        return ""
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")


def listed(processes: Sequence[GpuProcess]) -> str:
    """Processes in words."""

    def size(one: GpuProcess) -> str:
        return "not known" if one.used_bytes is None else format_size(one.used_bytes)

    return ", ".join(f"{one.name or 'process'} (pid {one.pid}, {size(one)})" for one in processes)
