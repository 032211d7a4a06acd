"""Makes a layer that runs twice have the same effects as one that runs once, and names the layers that cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from lightning_memtools._torch import (
    AnyBatchNorm,
    AnyDropout,
    StatisticsNorm,
    autograd_sequence_number,
    iterates_power,
)
from lightning_memtools.checkpointing.drawn_streams import Stream, streams_set_to
from lightning_memtools.memory.nested_tensors import tensors_in

# By name, for libraries that are not imported here: torchvision has StochasticDepth, timm DropPath and DropBlock2d.
_DROPOUTS_BY_NAME = {"StochasticDepth", "DropPath", "DropBlock2d", "PatchDropout", "DropBlock"}
_RATES = ("p", "drop_prob")


def is_dropout(module: nn.Module) -> bool:
    """Return whether a module is a Dropout of any kind that drops values in its current mode."""
    if not isinstance(module, AnyDropout) and type(module).__name__ not in _DROPOUTS_BY_NAME:
        return False
    rate = next((getattr(module, name) for name in _RATES if hasattr(module, name)), None)
    return module.training and not (isinstance(rate, (int, float)) and rate == 0)


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm that normalizes by the batch's statistics in its current mode."""
    return isinstance(module, AnyBatchNorm) and module.training


def is_special(module: nn.Module) -> bool:
    """Return whether the option `bn_dropout` is about this module."""
    return is_dropout(module) or is_batch_norm(module)


def updates_statistics(module: nn.Module) -> bool:
    """Return whether a forward pass updates running statistics, as BatchNorm does, and InstanceNorm on request."""
    return isinstance(module, StatisticsNorm) and module.training and module.track_running_stats


def why_outside(layer: nn.Module, bn_dropout: str) -> str | None:
    """Return why a layer may not be part of a recomputed range; None if it may."""
    # Run twice, it would communicate twice.
    sync = _first_within(layer, lambda part: isinstance(part, nn.SyncBatchNorm) and part.training)
    if sync is not None:
        return f"{sync} talks to other ranks"
    if _first_within(layer, lambda part: part.training and iterates_power(part)) is not None:
        return "power iteration (spectral_norm) would run twice"
    if bn_dropout == "skip" and is_special(layer):
        return f"{type(layer).__name__} never runs twice"
    if bn_dropout == "avoid":
        special = _first_within(layer, is_special)
        if special is not None:
            return f"contains {special}" if not is_special(layer) else f"is a {special}"
    return None


def _first_within(module: nn.Module, condition: Callable[[nn.Module], bool]) -> str | None:
    """Return the class name of the first module in a tree that meets the condition; parametrizations are included."""
    return next((type(part).__name__ for part in module.modules() if condition(part)), None)


@contextmanager
def statistics_untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """While entered, running statistics are written to copies.

    In training a batch is normalized by its own statistics, so the output is the same. These are copies, and not a
    momentum of 0, because an infinite activation would turn 0 * inf into nan.
    """
    originals: list[tuple[nn.Module, dict[str, Tensor]]] = []
    try:
        for module in modules:
            buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
            originals.append((module, buffers))
            for name, tensor in buffers.items():
                setattr(module, name, tensor.clone())
        yield
    finally:
        # In the opposite order: a module that is listed twice gets its own buffers back.
        for module, buffers in reversed(originals):
            for name, tensor in buffers.items():
                setattr(module, name, tensor)


class RunLog:
    """Records what each layer of a range returned in the forward pass, to compare with when it runs again.

    Torch's own check can only tell that some saved tensor differs; this one knows the layer. It compares shapes, types
    and counts of operators, which are known without waiting for the device.
    """

    __slots__ = ("_again", "_first", "_names", "_position", "_sequence")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._first: list[Any] = []
        self._position = 0
        self._sequence = 0
        self._again = False

    def begin(self) -> None:
        """Note that the range begins to run, for the first time or again."""
        self._again = bool(self._first)
        self._position = 0
        self._sequence = autograd_sequence_number()

    def note_output(self, out: Any) -> None:
        """Note the output of the next layer, and raise if it is not like the first one."""
        # Autograd numbers its operators as they run. Under autocast a weight's cast may be there once and cached once.
        last = autograd_sequence_number()
        operators = None if torch.is_autocast_enabled(_device_of(out)) else last - self._sequence
        seen = (*_signature(out), operators)
        self._sequence = last
        at = self._position
        self._position += 1
        if not self._again:
            self._first.append(seen)
        elif at < len(self._first) and self._first[at] != seen:
            raise CheckpointError(
                mismatch_message(
                    self._names[at], f"{_described(self._first[at])} the first time, {_described(seen)} the second"
                )
            )


def mismatch_message(layer: str, evidence: str) -> str:
    """Return which layer cannot be recomputed, and how to leave it out."""
    return (
        f"The layer {layer} did not do the same when it was run again for its gradient ({evidence}): its output "
        f"depends on something besides its input and weights. Leave it out of recomputation with exclude=[{layer!r}]."
    )


class LaterRun:
    """The context of a range's later runs: they leave running statistics alone, and draw the same random numbers.

    It is made anew whenever it is entered, as each backward through a range runs it again.

    Args:
        modules: The range's layers that update running statistics.
        states: Those of the streams that torch's checkpoint does not restore, before the first run.
    """

    def __init__(self, modules: Sequence[nn.Module], states: Sequence[tuple[Stream, Any]]) -> None:
        self._modules, self._states = modules, states
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(statistics_untouched([module for module in self._modules if updates_statistics(module)]))
        stack.enter_context(streams_set_to(self._states))
        self._entered.append(stack)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)


def _signature(out: Any) -> tuple[Any, ...]:
    return tuple((tuple(one.shape), one.dtype, type(one.grad_fn).__name__) for one in tensors_in(out))


def _device_of(value: Any) -> str:
    return next((one.device.type for one in tensors_in(value)), "cpu")


def _described(seen: tuple[Any, ...]) -> str:
    *tensors, operators = seen
    shown = ", ".join(f"{_shown(tensor)} by {tensor[-1]}" for tensor in tensors)
    return shown if operators is None else f"{shown} after {operators} operators"


def _shown(tensor: tuple[Any, ...]) -> str:
    return f"{list(tensor[0])} {str(tensor[1]).removeprefix('torch.')}"
