"""The categories of memory on a device, and its composition by category and module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Category(IntEnum):
    """The purpose of a storage. A storage has one category at a time, which may change while the program runs.

    * PARAMETER and BUFFER: registered in a module.
    * GRADIENT: in the ``.grad`` of a leaf, from the moment that autograd stores it there.
    * OPTIMIZER: made inside ``optimizer.step()``: state and temporaries, but not the memory made by a closure that was
      passed to the step.
    * ACTIVATION: made inside a module's call or in backward (gradients that are not stored yet included), or made
      outside of both from an activation or from a tensor that requires a gradient, such as a loss.
    * INPUT: batches of a DataLoader, and other tensors passed to a module that no other module is calling.
    * OTHER: the rest.
    """

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER = 3
    ACTIVATION = 4
    INPUT = 5
    OTHER = 6


@dataclass(frozen=True, slots=True)
class Composition:
    """Every allocated byte of a device, each in one category and charged to one module. Sizes are in bytes.

    Attributes:
        by_category: Bytes per category: parameter, buffer, gradient, optimizer, activation, input and other.
        by_module: Bytes per category, for each module with memory. Names consist of the outermost module's class name
            and the path to the module, such as ``"ResNet.layer1.0.conv1"``. Parameters, gradients and optimizer state
            are charged to the module that holds the parameter, and activations to the module whose call made them.
            ``"(backward)"``, ``"(optimizer)"`` and ``"(outside)"`` stand for memory that no module made.
    """

    by_category: Mapping[str, int]
    by_module: Mapping[str, Mapping[str, int]]

    @property
    def total(self) -> int:
        """The sum of all categories, which is exactly the allocated memory."""
        return sum(self.by_category.values())


def by_name(n_bytes: Sequence[int]) -> dict[str, int]:
    """Convert a sequence of sizes in the order of `Category` to a dict by category name."""
    return {category.name.lower(): n_bytes[category] for category in Category}


def as_log_names(n_bytes: Sequence[int]) -> dict[str, int]:
    """Convert sizes in the order of `Category` to a dict keyed by the names in log tags. Buffers count as "other"."""
    return {
        "parameters": n_bytes[Category.PARAMETER],
        "gradients": n_bytes[Category.GRADIENT],
        "optimizer": n_bytes[Category.OPTIMIZER],
        "activations": n_bytes[Category.ACTIVATION],
        "inputs": n_bytes[Category.INPUT],
        "other": n_bytes[Category.OTHER] + n_bytes[Category.BUFFER],
    }
