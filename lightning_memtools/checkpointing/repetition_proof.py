"""Proves that the layers of a range give the same values twice, before the range is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memtools._torch import FakeTensor, has_readable_values, tree_flatten, tree_unflatten, without_subclass
from lightning_memtools.checkpointing.exact_recomputation import (
    Stream,
    statistics_untouched,
    stream_states,
    streams_set_to,
)
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.state.random_state import random_streams_restored
from lightning_memtools.warning_categories import DegradedWarning

Run = Callable[[Callable[[Any], None], Any, Any], Any]
"""Runs layers one after the other: calls its first argument with the output of each, and gives the first the others."""

_CHUNK = 2**17
_STEP = -0x61C8864680B583EB  # odd, so that no earlier chunk is multiplied away


class RecomputationDiffersWarning(DegradedWarning):
    """Warns that some layers are not recomputed, because one of them gave different values in a second run."""


def layer_that_differs(
    run: Run, given: tuple[Any, Any], layers: Sequence[nn.Module], norms: Sequence[nn.Module], streams: Sequence[Stream]
) -> tuple[int, str] | None:
    """Run layers twice. Return the index of the first layer whose values differ, and a description; None if equal.

    Outputs and tensors saved for backward are compared by hashes of all their bits. Only the hashes are kept, so this
    needs no more memory than one forward pass of the layers without gradients. Random generators, buffers and running
    statistics are left as they were. Waits for the device. For the arguments, see `exact_recomputation.recomputed`.
    """
    seen: list[list[tuple[int, str, Tensor]]] = []
    for _ in range(2):
        prints, changed = _fingerprints_of(run, given, layers, norms, streams)
        if changed:
            return changed[0]
        seen.append(prints)
    first, second = seen
    for (layer, tensor, value), (_, other, other_value) in zip(first, second, strict=False):
        if tensor != other:
            return layer, f"{tensor} the first time, {other} the second"
        if value.item() != other_value.item():
            return layer, f"{tensor} had other values the second time"
    if len(first) != len(second):
        at = min(len(first), len(second)) - 1
        return first[max(at, 0)][0], "it kept another number of tensors the second time"
    return None


def holds_fake_tensors(value: Any) -> bool:
    """Return True if `value` holds fake tensors, which have no values to compare."""
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors_in(value))


def _fingerprints_of(
    run: Run, given: tuple[Any, Any], layers: Sequence[nn.Module], norms: Sequence[nn.Module], streams: Sequence[Stream]
) -> tuple[list[tuple[int, str, Tensor]], list[tuple[int, str]]]:
    """Run layers. Return hashes of the tensors that they return or save, and a list of the buffers that they change.

    Entries are (layer index, description, hash of the values) for tensors, and (layer index, description) for buffers.
    """
    prints: list[tuple[int, str, Tensor]] = []
    at = 0

    def note_output(out: Any) -> None:
        nonlocal at
        prints.extend((at, f"its output, {_shown(tensor)},", fingerprint(tensor)) for tensor in tensors_in(out))
        at += 1

    def note_kept(tensor: Tensor) -> None:
        layer = min(at, len(layers) - 1)
        is_unset = _is_seed(tensor, layers[layer]) or _is_reserve(tensor, layers[layer])
        value = torch.zeros((), dtype=torch.int64) if is_unset else fingerprint(tensor)
        prints.append((layer, f"a tensor that it keeps for backward, {_shown(tensor)},", value))

    with (
        statistics_untouched(norms),
        _buffers_restored(layers, norms) as changed,
        random_streams_restored(),
        streams_set_to(stream_states(streams)),
        _autocast_cache_off(),
        # Nothing is kept: packing gives None, and no gradient is taken.
        torch.autograd.graph.saved_tensors_hooks(note_kept, lambda none: none),
    ):
        run(note_output, *tree_unflatten(*tree_flatten(given)))  # in lists of its own, which a layer may change
    return prints, changed


def _is_seed(tensor: Tensor, layer: nn.Module) -> bool:
    """Return True if a tensor may be the dropout seed or offset of GPU attention. Its value may be undefined.

    Source: `_efficient_attention_forward` in aten/src/ATen/native/transformers/cuda/attention.cu.
    """
    is_number = tensor.ndim == 0 and tensor.dtype == torch.int64 and tensor.device.type == "cpu"
    return is_number and any(parameter.device.type != "cpu" for parameter in layer.parameters())


def _is_reserve(tensor: Tensor, layer: nn.Module) -> bool:
    """Return True if a tensor is the reserve space of an RNN layer (cuDNN or oneDNN), which is partly uninitialized.

    The reserve space is therefore not compared between runs, but the output of the layer is compared.
    """
    return tensor.dtype == torch.uint8 and any(isinstance(part, nn.RNNBase) for part in layer.modules())


@contextmanager
def _buffers_restored(layers: Sequence[nn.Module], norms: Sequence[nn.Module]) -> Iterator[list[tuple[int, str]]]:
    """Context manager: yield a list. On exit, restore all buffers (except of `norms`) and list those that changed."""
    skipped = set(map(id, norms))
    before = [
        (at, part, name, tensor, tensor.clone())
        for at, layer in enumerate(layers)
        for part in layer.modules()
        if id(part) not in skipped
        for name, tensor in part.named_buffers(recurse=False)
    ]
    changed: list[tuple[int, str]] = []
    yield changed
    with torch.no_grad():
        for at, part, name, tensor, value in before:
            if tensor.shape == value.shape and fingerprint(tensor).item() == fingerprint(value).item():
                continue
            changed.append((at, f"it changes {name} when it runs"))
            tensor.resize_(value.shape).copy_(value)
            setattr(part, name, tensor)


@contextmanager
def _autocast_cache_off() -> Iterator[None]:
    # A weight that is cast here would stay in the cache with a graph whose tensors were not kept.
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _shown(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's values. If two tensors differ in any bit, their hashes almost certainly differ, too.

    Each 8 bytes are multiplied by a fixed random odd number and summed modulo 2^64 (multilinear hashing, Carter and
    Wegman 1979), so that their order counts too. The hash is 0 for tensors whose values cannot be read.
    """
    if not has_readable_values(tensor):
        return torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        try:
            # To read a quantized tensor under another type ends the process.
            tensor = without_subclass(tensor.int_repr() if tensor.is_quantized else tensor)
            values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
            octets = values.view(torch.uint8)
            if octets.storage_offset() % 8:  # such a view cannot be read as 8-byte numbers
                octets = octets.clone()
            n_whole = len(octets) // 8 * 8
            total = _hash(octets[:n_whole].view(torch.int64))
            return total.mul_(_STEP).add_(_hash(octets[n_whole:].to(torch.int64)))
        except (NotImplementedError, RuntimeError, TypeError):  # sparse and nested tensors
            return torch.zeros((), dtype=torch.int64)


def _hash(bits: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    weights = _weights(min(_CHUNK, len(bits)), bits.device)
    for start in range(0, len(bits), _CHUNK):  # in chunks, which take little memory
        part = bits[start : start + _CHUNK]
        # The high half is added to the low one first: two signs that change would cancel modulo 2^64.
        folded = (part >> 32).bitwise_xor_(part)
        total.mul_(_STEP).add_(folded.mul_(weights[: len(part)]).sum())
    return total


def _weights(n: int, device: torch.device) -> Tensor:
    """Return n pseudo-random odd numbers, the same in every call. No random generator of the user is advanced."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (n,), generator=generator).mul_(2).add_(1).to(device)
