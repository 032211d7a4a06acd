"""The memory at a peak, by category, by module, and by the line of code that allocated it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools.memory.optimizer_lines import OptimizerLines
from lightning_memtools.memory.owned import cuda_address, owned_tensors


@dataclass(frozen=True, slots=True)
class PeakHolder:
    """A part of the memory at a peak: the bytes of one category that one line of code allocated in one module.

    Attributes:
        category: Parameters, gradients, optimizer, activations and so on.
        module: The path of the module; empty if it is not known.
        line: The line of code, such as "model.py:48: x = self.norm(x)"; empty if it is not known.
        n_bytes: The size in bytes, as the allocator rounds it.
    """

    category: str
    module: str
    line: str
    n_bytes: int


def gathered(holders: Iterable[PeakHolder]) -> tuple[PeakHolder, ...]:
    """Merge the holders that have the same category, module and line; return the merged holders, largest first."""
    sizes: Counter[tuple[str, str, str]] = Counter()
    for one in holders:
        sizes[one.category, one.module, one.line] += one.n_bytes
    ranked = sorted(sizes.items(), key=lambda one: (-one[1], one[0]))
    return tuple(PeakHolder(*who, n_bytes) for who, n_bytes in ranked if n_bytes)


def held_by(holders: Iterable[PeakHolder], what: Literal["category", "module", "line"]) -> dict[str, int]:
    """Return the bytes per category, module or line, largest first; "" stands for an unknown module or line."""
    sizes: Counter[str] = Counter()
    for one in holders:
        sizes[getattr(one, what)] += one.n_bytes
    return dict(sorted(sizes.items(), key=lambda one: (-one[1], one[0])))


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """The owner of a memory block on a device.

    Attributes:
        category: "parameters", "buffers", "gradients", "optimizer" or "inputs".
        module: The path of the module, or for the model itself its class name; None if it belongs to no module.
        line: For optimizer state, the line of code that created the optimizer; otherwise empty.
        name: The name of a tensor in the block, such as "head.weight.grad"; empty if it is not known.
    """

    category: str
    module: str | None = None
    line: str = ""
    name: str = ""


def block_owners(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    inputs: Any,
    lines: OptimizerLines | None = None,
    *,
    address_of: Callable[[Tensor], int | None] = cuda_address,
) -> dict[int, BlockOwner]:
    """Return the owner of each memory block of a model, its optimizers and a batch, as a dict by block address.

    Args:
        model: The model.
        optimizers: The model's optimizers.
        inputs: The batch.
        lines: The lines of code that created the optimizers; None if they were not recorded.
        address_of: Returns the address of a tensor's block; None if the tensor has no block on the device.
    """
    owners: dict[int, BlockOwner] = {}
    for owned in owned_tensors(model, optimizers, inputs):
        if (address := address_of(owned.tensor)) is not None and address not in owners:
            line = "" if lines is None or owned.optimizer is None else lines.line_of(owned.optimizer)
            module = type(model).__name__ if owned.module == "" else owned.module
            owners[address] = BlockOwner(owned.category, module, line, owned.owner + owned.suffix)
    return owners
