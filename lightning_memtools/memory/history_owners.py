"""Finds who held memory at the peak of a recorded history, from notes of the blocks' owners taken meanwhile."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.allocator.block_rounding import block_size
from lightning_memtools.memory.optimizer_lines import OptimizerLines
from lightning_memtools.memory.peak_holders import BlockOwner, PeakHolder, block_owners, gathered
from lightning_memtools.memory.user_code import line_of_frames

_Entry = Mapping[str, Any]
_Note = tuple[int, str | None, dict[int, BlockOwner]]


@dataclass
class OwnerNotes:
    """Records which stage was running and which tensor owned each memory block, to complement the allocator's history.

    Attributes:
        lines: The lines of code that created the optimizers.
        notes: A list of tuples (time, stage, owners): the time in microseconds since 1970, as in the history; the stage
            that runs from then on, or None; and a dict from the addresses of blocks to their owners.
    """

    lines: OptimizerLines = field(default_factory=OptimizerLines)
    notes: list[_Note] = field(default_factory=list)

    def enter(self, stage: str | None) -> None:
        """Record that a stage begins or continues; None means that no stage runs from now on."""
        self.notes.append((_now(), stage, {}))

    def note(self, stage: str | None, model: nn.Module, optimizers: Sequence[Optimizer], batch: Any) -> None:
        """Record the running stage, and the owner of each memory block of the model, the optimizers and the batch."""
        self.notes.append((_now(), stage, block_owners(model, optimizers, batch, self.lines)))

    def holders(self, entries: Sequence[_Entry]) -> dict[str, tuple[PeakHolder, ...]]:
        """Return what held memory at each stage's peak of allocated memory; blocks without an owner are "activations".

        Args:
            entries: The whole history of the device (`device_traces` of torch's snapshot).
        """
        stages = {at: stage for stage, at in self._peaks(entries).items()}
        live: dict[int, _Block] = {}
        at_peak: dict[str, list[_Block]] = {}
        for at, (entry, passed) in enumerate(self._beside(entries)):
            for address, owner in ((one, owner) for _, _, owned in passed for one, owner in owned.items()):
                if address in live:
                    live[address].owner = owner
            if entry["action"] == "alloc":
                live[entry["addr"]] = _Block(entry)
            elif entry["action"] == "free_completed":
                live.pop(entry["addr"], None)
            if at in stages:
                at_peak[stages[at]] = list(live.values())  # some of them get their owners later
        return {stage: gathered(one.holder() for one in blocks) for stage, blocks in at_peak.items()}

    def moment(self, entries: Sequence[_Entry], stage: str) -> str:
        """Describe where a stage reached its peak, as in "forward, in encoder.3"; "" if it allocated nothing."""
        at = self._peaks(entries).get(stage)
        if at is None:
            return ""
        phase, _, module = entries[at].get("user_metadata", "").partition(" | ")
        files = [frame["filename"] for frame in entries[at].get("frames") or ()]
        if not files:  # autograd's own thread runs no Python
            phase = "backward"
        elif any(file.endswith("torch/optim/optimizer.py") for file in files) and not module:
            phase = "optimizer"
        return ", in ".join(filter(None, (phase or "forward", module)))

    def _peaks(self, entries: Sequence[_Entry]) -> dict[str, int]:
        """Return, for each stage, the index of the history entry that raised allocated memory to its peak."""
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
        """Yield each entry with the notes made since the previous entry. Later notes come last, with an empty entry."""
        notes = deque(self.notes)
        for entry in entries:
            passed = []
            while notes and notes[0][0] < entry["time_us"]:
                passed.append(notes.popleft())
            yield entry, passed
        yield {"action": ""}, list(notes)


@dataclass(slots=True)
class _Block:
    entry: _Entry
    owner: BlockOwner | None = None

    def holder(self) -> PeakHolder:
        n_bytes = block_size(self.entry["size"])
        line = line_of_frames(self.entry.get("frames") or ())
        described = "" if line is None else line.described
        if self.owner is not None:
            return PeakHolder(self.owner.category, self.owner.module or "", self.owner.line or described, n_bytes)
        phase, _, module = self.entry.get("user_metadata", "").partition(" | ")
        if not module and (phase == "backward" or not self.entry.get("frames")):  # autograd's own thread runs no Python
            module = "(backward)"
        return PeakHolder("activations", module, described, n_bytes)


def _now() -> int:
    return time.time_ns() // 1000
