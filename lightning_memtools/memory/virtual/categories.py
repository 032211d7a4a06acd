"""What a byte on the device is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Category(IntEnum):
    """What a storage is for. It has one category at a time, and keeps the last one that is known of it.

    * PARAMETER and BUFFER: registered in a module.
    * GRADIENT: in the ``.grad`` of a leaf, from the moment that autograd stores it there.
    * OPTIMIZER: made inside ``optimizer.step()``: state, and what the step needs for a moment. A closure given to the
      step is not part of it.
    * ACTIVATION: made inside a module's call or in backward (gradients on their way included), or outside of both from
      an activation or from something that requires a gradient, such as a loss.
    * INPUT: what a DataLoader yields, and any other tensor passed to a module that is called from outside of modules.
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
    """Every allocated byte of a device, each in one category and charged to one module. Sizes in bytes.

    Attributes:
        by_category: Bytes per category: parameter, buffer, gradient, optimizer, activation, input and other.
        by_module: Bytes per category, for each module that has any. Modules go by their path below the outermost
            module, whose class name it starts with: ``"ResNet.layer1.0.conv1"``. Parameters, gradients and optimizer
            state are charged to the module that holds the parameter, activations to the module whose call made them;
            ``"(backward)"``, ``"(optimizer)"`` and ``"(outside)"`` stand for what no module made.
    """

    by_category: Mapping[str, int]
    by_module: Mapping[str, Mapping[str, int]]

    @property
    def total(self) -> int:
        """The sum of all categories: exactly what is allocated."""
        return sum(self.by_category.values())


def by_name(n_bytes: Sequence[int]) -> dict[str, int]:
    """Bytes in the order of `Category` as a dictionary under the categories' names."""
    return {category.name.lower(): n_bytes[category] for category in Category}


def as_log_names(n_bytes: Sequence[int]) -> dict[str, int]:
    """Bytes in the order of `Category` under the names of the log tags, where buffers count as other."""
    return {
        "parameters": n_bytes[Category.PARAMETER],
        "gradients": n_bytes[Category.GRADIENT],
        "optimizer": n_bytes[Category.OPTIMIZER],
        "activations": n_bytes[Category.ACTIVATION],
        "inputs": n_bytes[Category.INPUT],
        "other": n_bytes[Category.OTHER] + n_bytes[Category.BUFFER],
    }
