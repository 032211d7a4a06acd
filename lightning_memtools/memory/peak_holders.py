"""The memory at a peak, by what it is, by the module that it belongs to, and by the line of code that asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.optimizer_lines import OptimizerLines
from lightning_memtools.memory.owned import cuda_address, owned_addresses


@dataclass(frozen=True, slots=True)
class PeakHolder:
    """The memory that one line of code holds for one module at a peak.

    Attributes:
        category: Parameters, gradients, optimizer, activations and so on.
        module: The path of the module; empty where it is not known.
        line: The line that allocated it, such as "model.py:48: x = self.norm(x)"; empty where it is not known.
        n_bytes: Its bytes, as the allocator rounds them.
    """

    category: str
    module: str
    line: str
    n_bytes: int


def gathered(holders: Iterable[PeakHolder]) -> tuple[PeakHolder, ...]:
    """Return one holder for each category, module and line, largest first."""
    sizes: Counter[tuple[str, str, str]] = Counter()
    for one in holders:
        sizes[one.category, one.module, one.line] += one.n_bytes
    ranked = sorted(sizes.items(), key=lambda one: (-one[1], one[0]))
    return tuple(PeakHolder(*who, n_bytes) for who, n_bytes in ranked if n_bytes)


def held_by(holders: Iterable[PeakHolder], what: Literal["category", "module", "line"]) -> dict[str, int]:
    """Return the bytes of each category, module or line, largest first; those of none under an empty name."""
    sizes: Counter[str] = Counter()
    for one in holders:
        sizes[getattr(one, what)] += one.n_bytes
    return dict(sorted(sizes.items(), key=lambda one: (-one[1], one[0])))


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """The owner of a block on a device.

    Attributes:
        category: A category of `owned.tensors_by_owner`.
        module: The path of its module, for the model itself its class; None where it belongs to none.
        line: The line that made the optimizer, for an optimizer's state; else empty.
    """

    category: str
    module: str | None = None
    line: str = ""


def block_owners(
    model: nn.Module, optimizers: Sequence[Optimizer], inputs: Any, lines: OptimizerLines
) -> dict[int, BlockOwner]:
    """Return the owner of each block on a CUDA device that model, optimizers or inputs own, by the block's address."""
    modules = _modules_of_addresses(model, optimizers)
    made_at = {
        address: lines.line_of(one) for one in optimizers for _, address in owned_addresses(_NO_MODULE, [one], None)
    }
    return {
        address: BlockOwner(category, modules.get(address), made_at.get(address, ""))
        for category, address in owned_addresses(model, optimizers, inputs)
    }


_NO_MODULE = nn.Module()


def _modules_of_addresses(model: nn.Module, optimizers: Iterable[Optimizer]) -> Mapping[int, str]:
    found: dict[int, str] = {}
    module_of: dict[int, str] = {}

    def note(tensors: object, name: str) -> None:
        for one in tensors_in(tensors):
            address = cuda_address(one)
            if address is not None:
                found.setdefault(address, name)

    for path, module in model.named_modules():
        name = path or type(model).__name__  # as ModuleLabels names it
        for parameter in module.parameters(recurse=False):
            module_of.setdefault(id(parameter), name)
            note([parameter, parameter.grad], name)
        note(list(module.buffers(recurse=False)), name)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in module_of:
                note(state, module_of[id(parameter)])
    return found
