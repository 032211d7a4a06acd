"""What the allocated bytes of a device are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.owned import OnDevice, Owned, owned_by
from lightning_memtools.memory.virtual import Composition

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")


@runtime_checkable
class KnowsItsComposition(Protocol):
    """A device that knows of each byte what it is for, as a simulated one does."""

    def composition(self) -> Composition:
        """Every allocated byte by category and by module."""


@dataclass(frozen=True, slots=True)
class Split:
    """The allocated bytes, each in one category.

    Attributes:
        by_category: Bytes for each of `CATEGORIES`; they add up to what is allocated.
        buffers: The part of "other" that are the model's buffers.
        by_module: Activations in bytes by module, largest first, where the device knows them; else empty.
        older: What was there before the batch and belongs to none of model, optimizers and inputs.
        exact: Whether the device itself said so. If not, `older` counts as other, and what came with the batch as
            activations.
    """

    by_category: Mapping[str, int]
    buffers: int
    by_module: tuple[tuple[str, int], ...]
    older: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Before:
    """What was known when a batch began; tells what came with it.

    Attributes:
        allocated: Bytes allocated.
        had_gradients: Whether gradients of the step before were there.
        had_state: Whether the optimizers had their state.
    """

    allocated: int
    had_gradients: bool
    had_state: bool


def split_by_device(device: KnowsItsComposition, model: nn.Module, *, older: int | None = None) -> Split:
    """What the device itself says; `older`, where it is known, comes from walking."""
    composition = device.composition()
    now = composition.by_category
    root = type(model).__name__
    modules = {
        name.removeprefix(f"{root}."): sizes["activation"]
        for name, sizes in composition.by_module.items()
        if sizes["activation"]
    }
    return Split(
        {
            "parameters": now["parameter"],
            "gradients": now["gradient"],
            "optimizer": now["optimizer"],
            "activations": now["activation"],
            "inputs": now["input"],
            "other": now["other"] + now["buffer"],
        },
        now["buffer"],
        tuple(sorted(modules.items(), key=lambda item: -item[1])),
        now["other"] if older is None else older,
        exact=True,
    )


def split_by_walking(
    allocated: int,
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    on_device: OnDevice,
    *,
    batch: Any = None,
    before: Before | None = None,
) -> Split:
    """Add up what is known to belong to the model, its optimizers and the batch, and divide the rest by its age.

    Args:
        allocated: Bytes allocated now, which the categories are to add up to.
        model: Its parameters, buffers and gradients are known.
        optimizers: Their state is known.
        on_device: Which tensors count.
        batch: The inputs.
        before: What was there when the batch began. Without it, the rest counts as activations.
    """
    owned = owned_by(model, optimizers, on_device, inputs=batch)
    known = owned.by_category
    # Views of something larger can seem to take more than there is.
    rest = max(0, allocated - owned.total_bytes)
    older = 0 if before is None else min(rest, _older(before, owned, model, on_device))
    inputs = min(known["inputs"], allocated - (owned.total_bytes - known["inputs"]))
    return Split(
        {
            "parameters": known["parameters"],
            "gradients": known["gradients"],
            "optimizer": known["optimizer"],
            "activations": rest - older,
            "inputs": inputs,
            "other": older + known["buffers"],
        },
        known["buffers"],
        (),
        older,
        exact=False,
    )


def _older(before: Before, owned: Owned, model: nn.Module, on_device: OnDevice) -> int:
    """Bytes that nobody is known to own and that were there before the batch."""
    known = owned.by_category
    gradients = 0
    if before.had_gradients:
        # They may be gone or half made by now; each is as large as its parameter.
        trained = nn.ParameterList([p for p in model.parameters() if p.requires_grad])
        gradients = owned_by(trained, (), on_device).by_category["parameters"]
    state = known["optimizer"] if before.had_state else 0
    return max(0, before.allocated - known["parameters"] - known["buffers"] - known["inputs"] - gradients - state)
