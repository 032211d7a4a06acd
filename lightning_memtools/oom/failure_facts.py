"""The facts of an out-of-memory error: the place in the run, the device's statistics, the allocated bytes by category.

They are captured in the middle of the failing step, so nothing here allocates on the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.error_frames import variables_of
from lightning_memtools.memory.nested_tensors import batch_size_in, map_tensors, named_tensors, tensors_in
from lightning_memtools.memory.owned import OnDevice, bytes_on_device, composition_of, owned_by
from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.memory.user_code import LIGHTNING_PACKAGES, owner_of, short_path
from lightning_memtools.simulation.known_values import is_too_large

# A batch that is in a dimension so many times as large as the largest of at least so many before it is an odd one.
LEAST_ODD = 1.5
_LEAST_BEFORE = 3


@dataclass(frozen=True, slots=True)
class MemoryAtBatchStart:
    """The memory at the start of a batch, to tell what was allocated during the batch.

    Attributes:
        allocated: Bytes allocated.
        inputs: The bytes of the batch's tensors, which `allocated` includes.
        had_gradients: True if gradients of the previous step existed.
        had_state: True if the optimizers had state.
    """

    allocated: int
    inputs: int
    had_gradients: bool
    had_state: bool


def split_memory(
    allocated: int,
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    on_device: OnDevice,
    *,
    batch: Any = None,
    before: MemoryAtBatchStart | None = None,
) -> dict[str, int]:
    """Split the allocated bytes into categories: parameters, gradients, activations and so on.

    Memory outside of model, optimizers and batch counts as activations, or as "other" if it is older than the batch.

    Args:
        allocated: The bytes allocated now; the categories add up to them.
        model: Its parameters, buffers and gradients are counted.
        optimizers: Their state is counted.
        on_device: Returns whether a tensor is on the device. Other tensors are not counted.
        batch: Its tensors are counted as inputs.
        before: The memory when the batch began. Without it, nothing counts as "other".
    """
    owned = owned_by(model, optimizers, on_device, inputs=batch)
    older = 0
    if before is not None:
        known = owned.by_category
        # Gradients may be freed or incomplete by now; each is as large as its parameter.
        trained = nn.ParameterList([p for p in model.parameters() if p.requires_grad and before.had_gradients])
        gradients = owned_by(trained, (), on_device).by_category["parameters"]
        state = known["optimizer"] if before.had_state else 0
        older = before.allocated - known["parameters"] - known["buffers"] - known["inputs"] - gradients - state
    older = max(0, min(older, allocated - owned.total_bytes))
    return composition_of(owned, allocated, older=older) | {"buffers": owned.by_category["buffers"], "other": older}


@dataclass(frozen=True, slots=True)
class FailureMoment:
    """The place in the run where memory ran out.

    Attributes:
        stage: setup, train, val (also for the sanity check), test or predict.
        step: The training step, as shown on the x axis of logged values.
        batch_idx: The index of the batch within its epoch or evaluation; None outside of batches.
        phase: Within a training batch "forward", "backward" or "optimizer step"; empty elsewhere.
        hook: The hook that was running, or a description of other code outside of a step; "" in a step.
    """

    stage: str
    step: int = 0
    batch_idx: int | None = None
    phase: str = ""
    rank: int = 0
    world_size: int = 1
    hook: str = ""

    def __str__(self) -> str:
        hook = self.hook if " " in self.hook else f"in {self.hook}"
        parts = (
            self.stage,
            f"step {self.step}" if self.stage == "train" else "",
            "" if self.batch_idx is None else f"batch {self.batch_idx}",
            self.phase,
            hook if self.hook else "",
            f"rank {self.rank} of {self.world_size}" if self.world_size > 1 else "",
        )
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """Memory that has accumulated over the batches of a stage, apart from model, gradients and optimizer state."""

    n_bytes: int
    n_batches: int


@dataclass(slots=True)
class BatchesBefore:
    """The sizes of the batches that ran in a stage before the failed batch.

    Attributes:
        n: The number of these batches.
        most: For each tensor, by name such as `batch["boxes"]`, the largest size of each dimension.
        n_elements: The number of elements of the largest batch.
        largest: The batch with the most elements, as meta tensors without values.
    """

    n: int = 0
    most: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    n_elements: int = 0
    largest: Any = None

    def add(self, batch: Any) -> None:
        """Include one more batch. It is called in each step, and does next to nothing where all sizes are known."""
        shapes, n_elements = _shapes_of(batch)
        self.n += 1
        for name, shape in shapes.items():
            most = self.most.get(name, ())
            if shape != most:  # a new dict: facts of a failure may hold the old one
                self.most = {**self.most, name: tuple(map(max, shape, most)) if len(most) == len(shape) else shape}
        if n_elements > self.n_elements:
            self.n_elements, self.largest = n_elements, off_device(batch)

    def odd(self, batch: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Return (name, shape, usual shape) of each tensor with a dimension far larger than in earlier batches.

        Return [] if an earlier batch had at least as many elements, because this batch is then not unusually large.
        """
        shapes, n_elements = _shapes_of(batch)
        if self.n < _LEAST_BEFORE or n_elements <= self.n_elements:
            return []
        known = [(name, shape, self.most.get(name, ())) for name, shape in shapes.items()]
        return [
            (name, shape, most)
            for name, shape, most in known
            if len(shape) == len(most)
            and any(now >= LEAST_ODD * max(size, 1) for now, size in zip(shape, most, strict=True))
        ]


def _shapes_of(batch: Any) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return a dict from the name of each tensor in a batch to its shape, and the total number of elements."""
    tensors = dict(named_tensors(batch, "batch"))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, sum(map(torch.numel, tensors.values()))


class StepVariable(NamedTuple):
    """A variable that holds tensors. `where` is its name and place: "`scores` in assign (model.py:33)"."""

    where: str
    tensors: str
    n_bytes: int


def variables_of_step(on_device: OnDevice, seen: set[int]) -> list[StepVariable]:
    """Return the local variables that hold tensors in the user's functions on the call stack, largest first.

    Args:
        on_device: Returns whether a tensor is on the device. Other tensors are not counted.
        seen: The ids of storages that are already counted. Storages counted now are added.
    """
    found = []
    frame = inspect.currentframe()
    while frame is not None and LIGHTNING_PACKAGES.isdisjoint(Path(file := frame.f_code.co_filename).parts):
        inner, frame = frame, frame.f_back
        if owner_of(file) != "user":
            continue
        place = f"{inner.f_code.co_name} ({short_path(file)}:{inner.f_lineno})"
        for variable, value in variables_of(inner).items():
            tensors = [*tensors_in(value)] if isinstance(value, (torch.Tensor, list, tuple, dict)) else []
            sizes = [(tensor, bytes_on_device([tensor], on_device, seen)) for tensor in tensors]
            new = [tensor for tensor, n_bytes in sizes if n_bytes]
            if new:
                number = f"{len(new)} tensors, " if len(new) > 1 else ""
                shape = f"{number}{str(new[0].dtype).removeprefix('torch.')} {list(new[0].shape)}"
                found.append(StepVariable(f"`{variable}` in {place}", shape, sum(n_bytes for _, n_bytes in sizes)))
    return sorted(found, key=lambda one: -one.n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFacts:
    """The state of memory when it ran out, as plain data without tensors on the device. Sizes are in bytes.

    Attributes:
        moment: The place in the run.
        device: The device's name.
        stats: The memory statistics of the device; unknown values are None.
        requested: The number of bytes that could not be allocated; None if unknown.
        free: The free bytes of the device; None if unknown.
        used_by_others: Bytes held outside of the allocator: by other processes, and by this process's CUDA context.
        fraction: The fraction of device memory that PyTorch may reserve (`torch.cuda.set_per_process_memory_fraction`).
        split: The allocated bytes by category; None if unknown.
        grown: The memory that has accumulated over the batches; None if it is small or unknown.
        before: The batches of the stage before the failed one.
        variables: The variables of the step that held tensors of the device, the largest first.
        batch: The failed batch on the CPU, its large tensors as meta tensors without values; None between batches.
    """

    moment: FailureMoment
    device: str
    stats: MemoryStats = field(default_factory=MemoryStats)
    requested: int | None = None
    free: int | None = None
    used_by_others: int | None = None
    fraction: float = 1.0
    split: Mapping[str, int] | None = None
    grown: MemoryGrowth | None = None
    before: BatchesBefore = field(default_factory=BatchesBefore)
    variables: Sequence[StepVariable] = ()
    batch: Any = None

    @property
    def unusable(self) -> int | None:
        """Reserved bytes that were free, but in pieces too small to use. Empty segments had already been released."""
        if self.stats.reserved is None or self.stats.allocated is None:
            return None
        return self.stats.reserved - (self.stats.active or self.stats.allocated)

    @property
    def samples(self) -> int | None:
        """The batch size: the first dimension of the first tensor that has one; None if no tensor has a dimension."""
        return batch_size_in(self.batch)


def off_device(batch: Any, *, with_values: bool = False) -> Any:
    """Return a copy of a batch as meta tensors. `with_values`: small tensors keep their values, on the CPU."""

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if with_values and not is_too_large(tensor):
            return tensor.detach().to("cpu", copy=True)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return map_tensors(batch, meta)
