"""The memory of saved tensors that backward is done with, and that a layer which runs again has freed by then.

Autograd frees what a node saved when the gradients that it returned have been checked, and summed where a bias was
broadcast. `torch.utils.checkpoint` hands a recomputed tensor out once and keeps no reference: the tensor is freed as
soon as the node's formula ends, before that sum, whose buffers can be large.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from typing import TYPE_CHECKING

from lightning_memtools._torch import CAN_COUNT_REFERENCES, storage_references
from lightning_memtools.memory.virtual.ledger import DeviceListener

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from lightning_memtools.memory.allocator import Block
    from lightning_memtools.memory.virtual import VirtualDevice
    from lightning_memtools.memory.virtual.categories import Category

# By its attribute below, and by the call that counts.
_OWN_REFERENCES = 2


class SavedTensor:
    """A tensor that autograd saved; autograd holds this object until the node has run."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SpentTensors(DeviceListener):
    """Measures the peak of a backward pass as if saved tensors were freed when they are spent.

    A tensor is spent when autograd asked for it and only saved tensors that autograd asked for refer to its storage.

    Attributes:
        inputs: The ids of the blocks that the layer was given, which other code may hold.
    """

    def __init__(self, device: VirtualDevice) -> None:
        self.inputs: Collection[int] = ()
        self._device = device
        self._peaks = (0, 0, 0)
        self._handed_out: list[weakref.ref[SavedTensor]] = []

    def hand_out(self, saved: SavedTensor) -> Tensor:
        """Return the tensor, for which autograd asks."""
        if CAN_COUNT_REFERENCES:
            self._handed_out.append(weakref.ref(saved))
        return saved.tensor

    def peaks_since(self) -> tuple[int, int, int]:
        """Return the peak in bytes since the last call of this function, as three numbers.

        As it was; as if spent tensors but for inputs had been freed; and as if inputs had been freed too.
        """
        peaks, now = self._peaks, self._device.allocator.allocated
        self._peaks = now, now, now
        return peaks

    def on_allocation(self, block: Block, category: Category | None, module: str) -> None:
        """Take what is allocated now, without spent tensors, as the peak if it is higher."""
        del block, category, module
        now, spent = self._device.allocator.allocated, self._spent_blocks() if self._handed_out else {}
        others = sum(size for number, size in spent.items() if number not in self.inputs)
        peak, held, freed = self._peaks
        self._peaks = max(peak, now), max(held, now - others), max(freed, now - sum(spent.values()))

    def _spent_blocks(self) -> dict[int, int]:
        """Return the sizes of the blocks that are spent, by id."""
        alive = {id(saved): saved for ref in self._handed_out if (saved := ref()) is not None}
        self._handed_out = [weakref.ref(saved) for saved in alive.values()]
        times: Counter[int] = Counter()
        references: dict[int, tuple[int, int]] = {}
        held: set[int] = set()
        for saved in alive.values():
            entry = self._device.block_of(saved.tensor)
            if entry is not None:
                times[entry.block.id] += 1
                references[entry.block.id] = storage_references(saved.tensor), entry.block.size
                # A node that is written in Python gets the object itself, and holds it while its formula runs.
                if sys.getrefcount(saved.tensor) > _OWN_REFERENCES:
                    held.add(entry.block.id)
        return {key: size for key, (n, size) in references.items() if n == times[key] and key not in held}
