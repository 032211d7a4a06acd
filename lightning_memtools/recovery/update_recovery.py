"""Runs an optimizer's update again after it ran out of memory: from the same weights and states, with foreach=False."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.optim import Optimizer

from lightning_memtools.memory.error_frames import forget_frames
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.release_failed_step import release_cached, uncounted
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.state.starts import UpdateStart, tensors_written_by

# Adam makes two states and the foreach path one temporary of the parameters' size, AMSGrad one more of each; and the
# allocator cannot use every gap.
_AMPLE = 8


class UpdateRecovery:
    """Runs an optimizer's updates; the first one, which makes its states, is run again if memory runs out.

    Attributes:
        told: What was done, as a sentence; "" if nothing was needed so far.
    """

    def __init__(self, device: torch.device, *, n_ranks: int = 1) -> None:
        self.told = ""
        self._device = device
        self._n_ranks = n_ranks
        self._is_done: set[int] = set()

    def run(self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `step`, the optimizer's own, and return what it returns.

        Raises:
            torch.OutOfMemoryError: It cannot be run again; a note says why, in what state the weights are, and what
                would help.
        """
        closure: Callable[[], Any] | None = args[0] if args else kwargs.pop("closure", None)
        starts: list[UpdateStart | None] = []
        results: list[Any] = []

        def run_closure() -> Any:
            results.append(None if closure is None else closure())
            starts.append(None if id(optimizer) in self._is_done else _copied_start(optimizer, self._device))
            return results[-1]

        if closure is None:
            run_closure()
        else:
            kwargs["closure"] = run_closure
        try:
            result = step(**kwargs)
        except Exception as error:
            if not starts or not is_out_of_memory(error):
                raise  # in forward or backward
            if why_not := self._take_back(optimizer, starts):
                error.add_note(f"OOMRecovery did not run the optimizer's step again: {why_not} {_advice(optimizer)}")
                raise
            forget_frames(error)
        else:
            self._is_done.add(id(optimizer))
            return result
        release_cached(self._device)  # after the handler: until then the error holds the temporaries
        if closure is not None:
            kwargs["closure"] = lambda: results[-1]
        return self._run_again(optimizer, step, starts[0], kwargs)

    def _take_back(self, optimizer: Optimizer, starts: list[UpdateStart | None]) -> str:
        """Restore what the update changed; return why it is not run again, or ""."""
        start = starts[0]
        # Of other packages' optimizers nothing is known; LBFGS runs the closure several times.
        is_known = len(starts) == 1 and type(optimizer).__module__.startswith("torch.optim.")
        if start is None or not is_known:  # no copy is made where there seems to be room
            return "the weights may be half-updated, so do not save them, and go on from the last checkpoint."
        start.undo()
        if self._n_ranks > 1:
            return (
                "weights and states are as before it; but with foreach=False on one rank alone the others' may differ."
            )
        if not _foreach_groups(optimizer):
            return "weights and states are as before it, and there is no foreach to switch off."
        return ""

    def _run_again(
        self, optimizer: Optimizer, step: Callable[..., Any], start: UpdateStart | None, kwargs: dict[str, Any]
    ) -> Any:
        groups = [(group, group["foreach"]) for group in _foreach_groups(optimizer)]
        for group, _ in groups:
            group["foreach"] = False
        try:
            result = step(**kwargs)
        except Exception as error:
            for group, foreach in groups:
                group["foreach"] = foreach
            if start is not None:
                start.undo()
                error.add_note(
                    "OOMRecovery ran the optimizer's step again with foreach=False, and that does not fit either. "
                    f"Weights and states are as before it. {_advice(optimizer)}"
                )
            raise
        self._is_done.add(id(optimizer))
        self.told = (
            f"The step of {type(optimizer).__name__} ran out of memory and was run again with foreach=False, from the "
            "same weights, and keeps this setting. Each parameter is updated by the same formula, one by one, without "
            f"temporaries for all of them at once. {_advice(optimizer)}"
        )
        return result


def _copied_start(optimizer: Optimizer, device: torch.device) -> UpdateStart | None:
    """Copy weights and states to the host; None if memory seems ample, or if the host is short of it too.

    A copy is needed because a failed update leaves no record of its writes: in-place operations on lists of tensors do
    not count as writes.
    """
    reader = reader_for(device)
    stats = None if reader is None else reader.stats()
    n_bytes = sum(tensor.nbytes for tensor in tensors_written_by(optimizer))
    if stats is None or stats.capacity is None or stats.capacity - (stats.allocated or 0) > _AMPLE * n_bytes:
        return None
    if psutil.virtual_memory().available < 2 * n_bytes:
        return None
    try:
        with uncounted():
            return UpdateStart(optimizer, copy=lambda tensor: tensor.to("cpu", copy=True))
    except (RuntimeError, MemoryError):  # the host is full too
        return None


def _foreach_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        group for group in optimizer.param_groups if group.get("foreach", False) is not False and not group.get("fused")
    ]


def _advice(optimizer: Optimizer) -> str:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    n_bytes = sum(parameter.nbytes for parameter in parameters)
    return (
        f"It updates {format_size(n_bytes)} of parameters; states (Adam's take twice as much) and temporaries come on "
        "top. 8-bit optimizers have states of a quarter of the size, fused=True and foreach=False need no such "
        "temporaries, and FSDP or ZeRO divide both by the number of ranks."
    )
