"""Finds the holders of device memory that does not belong to the model, its optimizers or the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_memtools.memory.leaks.holder_search import names_of_run
from lightning_memtools.memory.leaks.holdings import BlockNotes, Holdings, find_holdings
from lightning_memtools.memory.memory_releaser import free_failed_backward
from lightning_memtools.memory.owned import KnowsItsTensors, cuda_address
from lightning_memtools.memory.release_failed_step import uncounted
from lightning_memtools.memory.user_code import line_of_frames
from lightning_memtools.oom.failed_step import FailedRun
from lightning_memtools.oom.failure_capture import FailureCapture

HOLDERS_S = 3.0
"""Processor time after which no further holder is looked for."""


def held_memory(run: FailedRun, capture: FailureCapture, snapshot: Mapping[str, Any] | None) -> Holdings:
    """Return the objects that hold device memory that is not of the model, its optimizers or the batch.

    Args:
        run: The failed run.
        capture: The FailureCapture that followed the run.
        snapshot: The memory snapshot; None if nothing was recorded.
    """
    if capture.reader is None:
        return Holdings()
    # Copies that a search makes of nothing are host memory, and so is what it frees for autograd.
    with uncounted():
        free_failed_backward()
    return find_holdings(
        capture.on_device,
        run.model,
        run.optimizers,
        capture.batch,
        names_of_run(run.model, [*run.others, run.trainer]),
        notes=BlockNotes() if snapshot is None else _notes(capture, snapshot),
        seconds=HOLDERS_S,
    )


def _notes(capture: FailureCapture, snapshot: Mapping[str, Any]) -> BlockNotes:
    """Return functions that tell from the snapshot whether this batch allocated a tensor, and which line did."""
    reader, device, began = capture.reader, capture.device.index or 0, capture.batch_began

    def address_of(tensor: Tensor) -> int | None:
        return reader.address_of(tensor) if isinstance(reader, KnowsItsTensors) else cuda_address(tensor)

    young = {
        entry["addr"]
        for entry in snapshot["device_traces"][device]
        if began is not None and entry["time_us"] >= began and entry["action"] == "alloc"
    }
    frames: dict[int, Any] = {}
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            address = segment["address"]
            for block in segment["blocks"]:
                frames[block.get("address", address)] = block.get("frames") or ()
                address += block["size"]
    return BlockNotes(
        lambda tensor: address_of(tensor) in young, lambda tensor: _maker(frames.get(address_of(tensor) or 0, ()))
    )


def _maker(frames: Any) -> str:
    """Return the place in the code that allocated a block, from its recorded stack; "" if unknown.

    This is the innermost line of the user's code, such as "at train.py:31". A simulated device records modules instead
    of lines, such as "in net.0".
    """
    module = next((frame["name"] for frame in frames if not frame["filename"]), "(")
    if not module.startswith("("):
        return f"in {module}"
    line = line_of_frames([frame for frame in frames if frame["filename"]])
    return "" if line is None else f"at {line}"
