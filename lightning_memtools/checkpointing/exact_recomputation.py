"""Makes a layer that runs twice have the same effects as one that runs once, and names the layers that cannot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    saved_tensor_hooks,
)
from lightning_memtools.checkpointing.drawn_streams import Stream, streams_set_to
from lightning_memtools.checkpointing.kept_products import KeptProducts
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
    """Records what each layer of a range returned and kept in the forward pass, to compare with when it runs again.

    Autograd's own check can only tell that some saved tensor differs; this one knows the layer. It compares shapes,
    types and counts of operators and of saved tensors, which are known without waiting for the device.
    """

    __slots__ = ("_again", "_first", "_kept", "_n_kept", "_names", "_position", "_sequence")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._first: list[Any] = []
        self._kept: list[tuple[int, Any]] = []
        self._n_kept = 0
        self._position = 0
        self._sequence = 0
        self._again = False

    def begin(self) -> None:
        """Note that the range begins to run, for the first time or again."""
        self._again = bool(self._first)
        self._position = self._n_kept = 0
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

    def note_kept(self, tensor: Tensor) -> None:
        """Note that a layer keeps a tensor for backward, and raise if it is not like the first one."""
        seen = self._position, (tuple(tensor.shape), tensor.dtype)
        if not self._again:
            self._kept.append(seen)
            return
        at = self._n_kept
        self._n_kept += 1
        if at < len(self._kept) and self._kept[at] != seen:
            layer, first = self._kept[at]
            if layer == seen[0]:
                evidence = f"it kept {_shown(first)} for backward the first time, {_shown(seen[1])} the second"
            else:
                evidence = "it kept another number of tensors for backward"
            raise CheckpointError(mismatch_message(self._name(min(layer, seen[0])), evidence))

    def incomplete_message(self) -> str:
        """Return the message for a second run that kept fewer tensors; it names the layer that kept too few."""
        layer = self._kept[self._n_kept][0] if self._n_kept < len(self._kept) else self._position
        return mismatch_message(self._name(layer), "it kept fewer tensors for backward")

    def _name(self, layer: int) -> str:
        return self._names[min(layer, len(self._names) - 1)]


def mismatch_message(layer: str, evidence: str) -> str:
    """Return which layer cannot be recomputed, and how to leave it out."""
    return (
        f"The layer {layer} did not do the same when it was run again for its gradient ({evidence}): its output "
        f"depends on something besides its input and weights. Leave it out of recomputation with exclude=[{layer!r}]."
    )


def contexts(
    modules: Sequence[nn.Module], log: RunLog, states: Sequence[tuple[Stream, Any]], kept: Collection[int] = ()
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a range's first and later runs, for `torch.utils.checkpoint`'s context_fn.

    Args:
        modules: The range's layers that update running statistics.
        log: What the layers return and keep.
        states: Those of the streams that torch's checkpoint does not restore, before the first run.
        kept: The products whose results are kept, by their order.
    """
    if not kept:
        return _Renewed(lambda: _watched(log)), _Renewed(lambda: _later_run(modules, log, states))
    products = KeptProducts(kept)
    return (
        _Renewed(lambda: _both(_watched(log), products.keeping())),
        _Renewed(lambda: _both(_later_run(modules, log, states), products.using())),
    )


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _Renewed:
    """A context manager that is made anew whenever it is entered: each backward through a range runs it again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)


@contextmanager
def _later_run(modules: Sequence[nn.Module], log: RunLog, states: Sequence[tuple[Stream, Any]]) -> Iterator[None]:
    with (
        statistics_untouched([module for module in modules if updates_statistics(module)]),
        streams_set_to(states),
        _watched(log),
    ):
        yield


@contextmanager
def _watched(log: RunLog) -> Iterator[None]:
    """While entered, the log is told of every tensor that is kept, and errors of autograd's check name a layer."""
    # Autograd calls only the hooks that were set last: so these call those of `checkpoint`, which surround them.
    pack, unpack = saved_tensor_hooks()

    def pack_and_note(tensor: Tensor) -> Any:
        log.note_kept(tensor)
        return pack(tensor)

    def unpack_or_name(packed: Any) -> Tensor:
        try:
            out: Tensor = unpack(packed)
        except CheckpointError as error:
            if "exclude=" in str(error):
                raise
            raise CheckpointError(log.incomplete_message()) from error
        return out

    with torch.autograd.graph.saved_tensors_hooks(pack_and_note, unpack_or_name):
        yield


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
