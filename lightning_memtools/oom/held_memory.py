"""Finds the holders of device memory that does not belong to the model, its optimizers or the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_memtools.memory.leaks.holder_search import names_of_run
from lightning_memtools.memory.leaks.holdings import Holdings, find_holdings
from lightning_memtools.memory.memory_releaser import free_failed_backward
from lightning_memtools.memory.owned import KnowsItsTensors, cuda_address
from lightning_memtools.memory.release_failed_step import uncounted
from lightning_memtools.oom.failed_step import FailedRun
from lightning_memtools.oom.failure_capture import FailureCapture

HOLDERS_S = 3.0
"""Processor time after which no further holder is looked for."""


def held_memory(run: FailedRun, capture: FailureCapture, snapshot: Mapping[str, Any] | None) -> Holdings:
    """Return the objects that hold device memory, apart from the model, its optimizers and the batch.

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
        is_young=None if snapshot is None else _is_young(capture, snapshot),
        seconds=HOLDERS_S,
    )


def _is_young(capture: FailureCapture, snapshot: Mapping[str, Any]) -> Callable[[Tensor], bool]:
    """Return a function that tells from the snapshot whether a tensor was allocated in the current batch."""
    reader, began = capture.reader, capture.batch_began
    young = {
        entry["addr"]
        for entry in snapshot["device_traces"][capture.device.index or 0]
        if began is not None and entry["time_us"] >= began and entry["action"] == "alloc"
    }
    if isinstance(reader, KnowsItsTensors):
        return lambda tensor: reader.address_of(tensor) in young
    return lambda tensor: cuda_address(tensor) in young
