"""The composition of a dry run's peaks: the owners of the blocks that were allocated at the moment of each peak."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.allocator.block_rounding import block_size
from lightning_memtools.memory.owned import owned_addresses

_Entry = Mapping[str, Any]
_Note = tuple[int, str | None, dict[int, str]]


@dataclass
class OwnerNotes:
    """Notes of which stage runs and which blocks have which owner, to be read beside the allocator's history.

    Attributes:
        notes: Time in microseconds since 1970, as in the history; the stage that runs from then on, or None; and
            owners by the addresses of their blocks.
    """

    notes: list[_Note] = field(default_factory=list)

    def enter(self, stage: str | None) -> None:
        """Note that a stage begins or continues; None where none runs."""
        self.notes.append((_now(), stage, {}))

    def note(self, stage: str | None, model: nn.Module, optimizers: Iterable[Optimizer], batch: Any) -> None:
        """Note the blocks of parameters, buffers, gradients, optimizer states and inputs."""
        owned: dict[int, str] = {}
        for name, address in owned_addresses(model, optimizers, batch):
            owned.setdefault(address, name)
        self.notes.append((_now(), stage, owned))

    def compositions(self, entries: Sequence[_Entry]) -> dict[str, dict[str, int]]:
        """Return the bytes of each owner when the most was allocated, by stage; without blocks that have no owner.

        Args:
            entries: The whole history of the device (`device_traces` of torch's snapshot).
        """
        stages = {at: stage for stage, at in self._peaks(entries).items()}
        live: dict[int, _Block] = {}
        at_peak: dict[str, list[_Block]] = {}
        for at, (entry, passed) in enumerate(self._beside(entries)):
            for address, owner in ((one, name) for _, _, owned in passed for one, name in owned.items()):
                if address in live:
                    live[address].owner = owner
            if entry["action"] == "alloc":
                live[entry["addr"]] = _Block(block_size(entry["size"]))
            elif entry["action"] == "free_completed":
                live.pop(entry["addr"], None)
            if at in stages:
                at_peak[stages[at]] = list(live.values())  # some of them get their owners later
        return {stage: _bytes_by_owner(blocks) for stage, blocks in at_peak.items()}

    def _peaks(self, entries: Sequence[_Entry]) -> dict[str, int]:
        """Return the position of the entry after which each stage has the most allocated."""
        most: dict[str, tuple[int, int]] = {}
        stage, allocated = None, 0
        for at, (entry, passed) in enumerate(self._beside(entries)):
            stage = passed[-1][1] if passed else stage
            if entry["action"] == "alloc":
                allocated += block_size(entry["size"])
                if stage is not None and allocated > most.get(stage, (0, 0))[0]:
                    most[stage] = allocated, at
            elif entry["action"] == "free_completed":
                allocated -= block_size(entry["size"])
        return {stage: at for stage, (_, at) in most.items()}

    def _beside(self, entries: Sequence[_Entry]) -> Iterator[tuple[_Entry, list[_Note]]]:
        """Yield each entry with the notes that were made since the one before; the last notes with an empty entry."""
        notes = deque(self.notes)
        for entry in entries:
            passed = []
            while notes and notes[0][0] < entry["time_us"]:
                passed.append(notes.popleft())
            yield entry, passed
        yield {"action": ""}, list(notes)


@dataclass(slots=True)
class _Block:
    size: int
    owner: str = ""


def _bytes_by_owner(blocks: Iterable[_Block]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for block in blocks:
        if block.owner:
            found[block.owner] += block.size
    return dict(found)


def _now() -> int:
    return time.time_ns() // 1000
