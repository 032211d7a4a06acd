"""Frees the memory of a failed step (frames, gradients, cached blocks), and names what holds the rest."""

from __future__ import annotations

import gc
import inspect
import traceback
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools._torch import tree_leaves
from lightning_memtools.memory.error_frames import forget_frames, variables_of
from lightning_memtools.memory.leaks.holders import find_holder, names_of_modules
from lightning_memtools.memory.leaks.tensor_census import TensorCensus
from lightning_memtools.memory.living_objects import instances_of
from lightning_memtools.memory.memory_releaser import free_failed_backward
from lightning_memtools.memory.oom_errors import error_chain
from lightning_memtools.memory.owned import OnDevice, on_device_of, owned_by, storage_of
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.memory.virtual import VirtualDevice

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class FailedStepRelease:
    """The result of `release_failed_step`: the memory that it freed and the memory that stays. `print` shows a summary.

    Attributes:
        freed_bytes: The memory that was freed, summed over all devices.
        allocated_bytes: The memory that is still allocated.
        owned_bytes: The part of `allocated_bytes` that models and optimizers own.
        holders: Texts such as "1.00 GiB by Net.outs" that say what holds the largest of the other tensors.
    """

    freed_bytes: int
    allocated_bytes: int
    owned_bytes: int
    holders: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"{format_size(self.freed_bytes)} were released, and {format_size(self.allocated_bytes)} are still "
            f"allocated, {format_size(self.owned_bytes)} of this for models and optimizers."
        )
        return "\n".join([text, *(f"Still held: {holder}." for holder in self.holders)])


def release_failed_step(error: BaseException, model: nn.Module | None = None) -> FailedStepRelease:
    """Free the memory that a step still holds after it ran out of memory, so that the program can go on.

    This clears the local variables in the error's traceback frames, sets gradients to None, frees the tensors that
    autograd still holds if backward failed, collects garbage and empties the cache. Weights and optimizer states stay.
    Functions that are still running, such as the caller, keep their variables; the result lists the large variables.

    Args:
        error: The error that was caught.
        model: The model whose gradients become None; by default, every model in local variables of the traceback.
    """
    running = _running_frames_of(error)
    models = _models_of(error) if model is None else [model]
    optimizers = instances_of(Optimizer)
    places = {tensor.device for one in models for tensor in one.parameters()} or {torch.device("cpu")}
    devices = {id(reader): (reader, place) for place in places if (reader := reader_for(place)) is not None}.values()
    before = sum(reader.stats().allocated or 0 for reader, _ in devices)
    for one in models:
        for parameter in one.parameters():
            parameter.grad = None
    forget_frames(error)
    gc.collect()
    for place in places:
        release_cached(place)
    owned, holders = 0, []
    for reader, place in devices:
        own, held = _held_on(on_device_of(reader, place), models, optimizers, running)
        owned += own
        holders += held
    after = sum(reader.stats().allocated or 0 for reader, _ in devices)
    return FailedStepRelease(max(0, before - after), after, owned, tuple(holders))


def release_cached(device: torch.device) -> None:
    """Free the tensors that autograd still holds if backward failed, and empty the cache of a device."""
    with uncounted():
        free_failed_backward()
    reader = reader_for(device)
    if reader is not None:
        reader.empty_cache()


def uncounted() -> AbstractContextManager[None]:
    """Return a context manager inside which a simulated device does not count CPU tensors as its own."""
    virtual = VirtualDevice.current()
    return nullcontext() if virtual is None else virtual.suspended()


def _running_frames_of(error: BaseException) -> list[FrameType]:
    """Return the error's traceback frames that are still running, such as the one that caught the error."""
    frames = [] if error.__traceback__ is None else [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    running = set()
    frame = inspect.currentframe()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    return [frame for frame in frames if id(frame) in running]


def _models_of(error: BaseException) -> list[nn.Module]:
    """Return the models in local variables of the error's traceback frames, but no module that is part of another."""
    frames = [frame for one in error_chain(error) for frame, _ in traceback.walk_tb(one.__traceback__)]
    values = [value for frame in frames for value in variables_of(frame).values()]
    found = list({id(value): value for value in values if isinstance(value, nn.Module)}.values())
    parts = {id(part) for one in found for part in one.modules() if part is not one}
    return [one for one in found if id(one) not in parts]


def _held_on(
    on_device: OnDevice, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], running: Iterable[FrameType]
) -> tuple[int, list[str]]:
    """Return the bytes of models and optimizers on a device; for the rest, texts such as "1.00 GiB by Net.outs"."""
    owned = owned_by(nn.ModuleList(models), optimizers, on_device)
    rest = TensorCensus(on_device).take(owned.storages)
    rest.sort(key=lambda one: -one.n_bytes)
    names = {key: name for model in models for key, name in names_of_modules(model).items()}
    variables = {
        found[0]: f"`{name}` in {frame.f_code.co_name} ({short_path(frame.f_code.co_filename)}:{frame.f_lineno})"
        for frame in running
        for name, value in variables_of(frame).items()
        for tensor in tree_leaves(value)
        if isinstance(tensor, Tensor) and (found := storage_of(tensor)) is not None
    }
    by_holder: dict[str, int] = {}
    for one in rest[:_MOST_NAMED]:
        holder = None if one.key in variables else find_holder(one.tensors[0], names, ignore=(one.tensors,))
        nobody = "nobody that Python sees, such as an autograd graph"
        who = variables.get(one.key) or (nobody if holder is None else holder.path + holder.place)
        by_holder[who] = by_holder.get(who, 0) + one.n_bytes
    return owned.total_bytes, [f"{format_size(n_bytes)} by {who}" for who, n_bytes in by_holder.items()]
