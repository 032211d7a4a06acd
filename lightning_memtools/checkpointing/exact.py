"""Makes running a layer a second time leave the same traces as running it once, and says where that fails."""

# ruff: noqa: SLF001 - modules, autograd and storages are looked at through torch's own underscored parts, as torch's tools do
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from lightning_memtools.checkpointing.kinds import tracks_statistics


@contextmanager
def statistics_untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within, running statistics are written to copies.

    The batch's own statistics normalize a batch in training, so the output is the same. Copies, and not a momentum of
    0: an infinite activation would turn 0 * inf into nan.
    """
    held: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    try:
        for module in modules:
            own = dict(module._buffers)
            held.append((module, own))
            for name, tensor in own.items():
                if tensor is not None:
                    module._buffers[name] = tensor.clone()
        yield
    finally:
        # In the opposite order: a module that is listed twice gets its own buffers back.
        for module, own in reversed(held):
            module._buffers.update(own)


class RunLog:
    """What each layer of a range gave and kept in the forward pass, to compare with when it runs again.

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
        """The range begins to run: the first time, or again."""
        self._again = bool(self._first)
        self._position = self._n_kept = 0
        self._sequence = torch._C._autograd._get_sequence_nr()

    def note(self, out: Any) -> None:
        """A layer has run."""
        seen = _signature(out)
        # Autograd numbers its operators as they run. Under autocast a weight's cast may be there once and cached once.
        last = torch._C._autograd._get_sequence_nr()
        counted = not torch.is_autocast_enabled(_device_of(out))
        seen = (*seen, last - self._sequence if counted else None)
        self._sequence = last
        at = self._position
        self._position += 1
        if not self._again:
            self._first.append(seen)
        elif at < len(self._first) and self._first[at] != seen:
            raise CheckpointError(
                mismatch_message(self._names[at], f"{_described(self._first[at])} at first, {_described(seen)} then")
            )

    def keep(self, tensor: Tensor) -> None:
        """A layer keeps a tensor for backward."""
        seen = self._position, (tuple(tensor.shape), tensor.dtype)
        if not self._again:
            self._kept.append(seen)
            return
        at = self._n_kept
        self._n_kept += 1
        if at < len(self._kept) and self._kept[at] != seen:
            layer, first = self._kept[at]
            if layer == seen[0]:
                evidence = f"it kept {_shown(first)} for backward at first, {_shown(seen[1])} then"
            else:
                evidence = "it kept another number of tensors for backward"
            raise CheckpointError(mismatch_message(self._name(min(layer, seen[0])), evidence))

    def incomplete(self) -> str:
        """What to say when fewer tensors were kept than at first: the layer that still owed one."""
        layer = self._kept[self._n_kept][0] if self._n_kept < len(self._kept) else self._position
        return mismatch_message(self._name(layer), "it kept fewer tensors for backward")

    def _name(self, layer: int) -> str:
        return self._names[min(layer, len(self._names) - 1)]


def mismatch_message(layer: str, evidence: str) -> str:
    """Says which layer cannot be recomputed, and how to leave it out."""
    return (
        f"The layer {layer} did not do the same when it was run again for its gradient ({evidence}): its output "
        f"depends on something besides its input and weights. Leave it out of recomputation with exclude=[{layer!r}]."
    )


def contexts(
    modules: Sequence[nn.Module], log: RunLog
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What surrounds the first run of a range and the second, for `torch.utils.checkpoint`'s context_fn."""
    return _watched(log), _second_run(modules, log)


@contextmanager
def _second_run(modules: Sequence[nn.Module], log: RunLog) -> Iterator[None]:
    with statistics_untouched([module for module in modules if tracks_statistics(module)]), _watched(log):
        yield


@contextmanager
def _watched(log: RunLog) -> Iterator[None]:
    """Within, the log is told of all that is kept, and an error that autograd's check raises names a layer."""
    # Only the hooks that were set last are called: so these call those of `checkpoint`, which surround this.
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003, its only form

    def keep(tensor: Tensor) -> Any:
        log.keep(tensor)
        return pack(tensor)

    def give(kept: Any) -> Tensor:
        try:
            out: Tensor = unpack(kept)
        except CheckpointError as error:
            if "exclude=" in str(error):
                raise
            raise CheckpointError(log.incomplete()) from error
        return out

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        yield


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _signature(out: Any) -> tuple[Any, ...]:
    return tuple((tuple(one.shape), one.dtype, type(one.grad_fn).__name__) for one in _tensors(out))


def _device_of(value: Any) -> str:
    return next((one.device.type for one in _tensors(value)), "cpu")


def _described(seen: tuple[Any, ...]) -> str:
    *tensors, operators = seen
    shown = ", ".join(f"{_shown(tensor)} by {tensor[-1]}" for tensor in tensors)
    return shown if operators is None else f"{shown} after {operators} operators"


def _shown(tensor: tuple[Any, ...]) -> str:
    return f"{list(tensor[0])} {str(tensor[1]).removeprefix('torch.')}"
