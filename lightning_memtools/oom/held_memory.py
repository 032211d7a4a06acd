"""Finds who holds what the failed step does not need, once that step has been let go of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_memtools.memory.leaks.holdings import BlockNotes, Holdings, find_holdings
from lightning_memtools.memory.leaks.leak_detector import SearchScope
from lightning_memtools.memory.memory_releaser import free_failed_backward
from lightning_memtools.memory.owned import KnowsItsTensors, cuda_address
from lightning_memtools.memory.release_failed_step import uncounted
from lightning_memtools.oom.failed_step import FailedRun
from lightning_memtools.oom.failure_capture import FailureCapture
from lightning_memtools.oom.fragmentation import maker

HOLDERS_S = 3.0
"""Processor time after which no further holder is looked for."""


def held_memory(run: FailedRun, capture: FailureCapture, snapshot: Mapping[str, Any] | None) -> Holdings:
    """Return who holds what lies on the device beside the model, its optimizers and the batch.

    Args:
        run: The facts of the run.
        capture: The object that captured the facts.
        snapshot: The memory snapshot; None where nothing was recorded.
    """
    if capture.reader is None:
        return Holdings()
    # Copies that a search makes of nothing are host memory, and so is what it frees for autograd.
    with uncounted():
        free_failed_backward()
    scope = SearchScope.around(run.model, run.others, run.trainer)
    return find_holdings(
        capture.on_device,
        run.model,
        run.optimizers,
        (capture.batch, run.predictions),
        scope,
        notes=_notes(capture, snapshot),
        seconds=HOLDERS_S,
    )


def _notes(capture: FailureCapture, snapshot: Mapping[str, Any] | None) -> BlockNotes:
    """Return what a snapshot says of the blocks of tensors."""
    if snapshot is None:
        return BlockNotes()
    reader, device, began = capture.reader, capture.device.index or 0, capture.batch_began

    def address_of(tensor: Tensor) -> int | None:
        return reader.address_of(tensor) if isinstance(reader, KnowsItsTensors) else cuda_address(tensor)

    young: set[int] = set()
    for entry in reversed(snapshot["device_traces"][device] if began is not None else ()):
        if entry["time_us"] < (began or 0):
            break
        if entry["action"] == "alloc":
            young.add(entry["addr"])
    frames: dict[int, Any] = {}
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            at = segment["address"]
            for block in segment["blocks"]:
                frames[block.get("address", at)] = block.get("frames") or ()
                at += block["size"]
    return BlockNotes(
        lambda tensor: address_of(tensor) in young, lambda tensor: maker(frames.get(address_of(tensor) or 0, ()))
    )
