"""Proves that the layers of a range give the same values twice, before the range is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memtools._torch import FakeTensor, has_readable_values, tree_flatten, tree_unflatten
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
    """Warns that a range is not recomputed, because one of its layers gave different values in the second run."""


def layer_that_differs(
    run: Run, given: tuple[Any, Any], layers: Sequence[nn.Module], norms: Sequence[nn.Module], streams: Sequence[Stream]
) -> tuple[int, str] | None:
    """Run layers twice; return the index of the first whose values differ, with a description, or None if none differ.

    Outputs and tensors saved for backward are compared by hashes of all their bits. Because only the hashes are kept,
    this needs no more memory than the forward pass of the range. Random generators and running statistics are left as
    they were. Waits for the device.
    """
    first, second = (_fingerprints_of(run, given, layers, norms, streams) for _ in range(2))
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
) -> list[tuple[int, str, Tensor]]:
    """Run layers, and return (layer index, description, hash) of each tensor that they return or save for backward."""
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
        random_streams_restored(),
        streams_set_to(stream_states(streams)),
        _autocast_cache_off(),
        # Nothing is kept: packing gives None, and no gradient is taken.
        torch.autograd.graph.saved_tensors_hooks(note_kept, lambda none: none),
    ):
        run(note_output, *tree_unflatten(*tree_flatten(given)))  # in lists of its own, which a layer may change
    return prints


def _is_seed(tensor: Tensor, layer: nn.Module) -> bool:
    """Return True if a tensor may be GPU attention's dropout seed or offset, which is uninitialized without dropout.

    Source: `_efficient_attention_forward` in aten/src/ATen/native/transformers/cuda/attention.cu.
    """
    is_number = tensor.ndim == 0 and tensor.dtype == torch.int64 and tensor.device.type == "cpu"
    return is_number and any(parameter.device.type != "cpu" for parameter in layer.parameters())


def _is_reserve(tensor: Tensor, layer: nn.Module) -> bool:
    """Return True if a tensor is the reserve space of an RNN layer (cuDNN or oneDNN), which is partly uninitialized.

    For such layers the output alone shows whether the values are the same.
    """
    return tensor.dtype == torch.uint8 and any(isinstance(part, nn.RNNBase) for part in layer.modules())


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
    """Return a hash of a tensor. If two tensors differ in any bit or in order, so (almost certainly) do their hashes.

    The hash is a sum modulo 2^64 of every 8 bytes times a fixed random odd number (multilinear hashing, Carter and
    Wegman 1979). A single different element always changes it. `torch.hash_tensor` ignores the order, and is the same
    for any even number of equal elements. The hash is 0 for tensors whose values cannot be read.
    """
    # To read a quantized tensor under another type ends the process.
    if not has_readable_values(tensor) or tensor.is_quantized:
        return torch.zeros((), dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    with torch.no_grad(), suppress(NotImplementedError, RuntimeError, TypeError):  # sparse and nested tensors
        parts = torch.split(tensor.detach().flatten(), _CHUNK)  # which take little memory
        weights = _weights(parts[0].nbytes // 8 + 1, tensor.device)
        for part in parts:
            octets = part.view(torch.uint8)
            numbers = F.pad(octets, (0, -len(octets) % 8)).view(torch.int64)
            # The high half is added to the low one first: two signs that change would cancel modulo 2^64.
            folded = (numbers >> 32).bitwise_xor_(numbers)
            total.mul_(_STEP).add_(folded.mul_(weights[: len(folded)]).sum())
    return total


def _weights(n: int, device: torch.device) -> Tensor:
    """Return n random odd numbers, the same in every call, without advancing any of the user's random generators."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (n,), generator=generator).mul_(2).add_(1).to(device)
