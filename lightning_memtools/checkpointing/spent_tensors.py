"""The memory of saved tensors that backward is done with, and that a layer which runs again has freed by then.

Autograd frees what a node saved when the gradients that it returned have been checked, and summed where a bias was
broadcast. `torch.utils.checkpoint` hands a recomputed tensor out once and keeps no reference: the tensor is freed as
soon as the node's formula ends, before that sum, whose buffers can be large.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from lightning_memtools._torch import CAN_COUNT_REFERENCES, storage_references
from lightning_memtools.memory.virtual.ledger import DeviceListener

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from lightning_memtools.memory.allocator import Block
    from lightning_memtools.memory.virtual import VirtualDevice
    from lightning_memtools.memory.virtual.categories import Category


class SavedTensor:
    """A tensor that autograd saved; autograd holds this object until the node has run."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SpentTensors(DeviceListener):
    """Measures the peak of a backward pass as if saved tensors were freed when they are spent.

    A tensor is spent when autograd asked for it and only saved tensors that autograd asked for refer to its storage.

    Attributes:
        held: The ids of the blocks that are not freed early, because code outside of the layer refers to them.
    """

    def __init__(self, device: VirtualDevice) -> None:
        self.held: Collection[int] = ()
        self._device = device
        self._peak = 0
        self._handed_out: list[weakref.ref[SavedTensor]] = []

    def hand_out(self, saved: SavedTensor) -> Tensor:
        """Return the tensor, for which autograd asks."""
        if CAN_COUNT_REFERENCES:
            self._handed_out.append(weakref.ref(saved))
        return saved.tensor

    def peak_since(self) -> int:
        """Return the peak in bytes since the last call of this function."""
        peak, self._peak = self._peak, self._device.allocator.allocated
        return peak

    def on_allocation(self, block: Block, category: Category | None, module: str) -> None:
        """Take what is allocated now, without spent tensors, as the peak if it is higher."""
        del block, category, module
        self._peak = max(self._peak, self._device.allocator.allocated - self._spent_bytes())

    def _spent_bytes(self) -> int:
        if not self._handed_out:
            return 0
        alive = [(ref, saved) for ref in self._handed_out if (saved := ref()) is not None]
        self._handed_out = [ref for ref, _ in alive]
        by_block: dict[int, list[Any]] = {}
        for _, saved in {id(saved): (None, saved) for _, saved in alive}.values():
            entry = self._device.block_of(saved.tensor)
            if entry is not None and entry.block.id not in self.held:
                by_block.setdefault(entry.block.id, [entry.block.size, storage_references(saved.tensor), 0])[2] += 1
        return sum(size for size, references, spent in by_block.values() if references == spent)
