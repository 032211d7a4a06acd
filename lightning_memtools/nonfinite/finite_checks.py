"""Finds NaN and Inf: one fused pass over gradients and losses, and if that finds some, a look at each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memtools._torch import (
    flattened,
    has_readable_values,
    is_in_memory,
    l2_norm_of_each,
    uncoalesced_parts,
    without_subclass,
)
from lightning_memtools.memory.nested_tensors import named_tensors, tensors_in


def rows_with(marked: Tensor, most: int | None = None) -> list[int]:
    """Return the first `most` indices along dimension 0 at which any element is True. Waits for the device."""
    rows = marked.flatten(1).any(1) if marked.dim() > 1 else marked
    positions: list[int] = rows.nonzero()[:most, 0].tolist()
    return positions


def floats_of(tensor: Tensor) -> Tensor | None:
    """Return the floating-point values that a tensor stores on this rank; None if it has none that can be read.

    This is safe for every kind of tensor. Sparse and nested tensors give their stored values, distributed
    tensors their local shard, and complex tensors pairs of real numbers. Meta, fake, quantized and uninitialized
    tensors, and tensors whose memory was freed, have no values that can be read.
    """
    try:
        floats = _stored_floats(tensor)
        return None if floats is None or floats.numel() == 0 else floats
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return None  # a subclass or data type that refuses even to be looked at


def _stored_floats(tensor: Tensor) -> Tensor | None:
    is_plain = type(tensor) in {Tensor, Parameter}
    if not is_plain and hasattr(tensor, "to_local"):  # a missing attribute is slow to look up
        tensor = tensor.to_local()
    if not has_readable_values(tensor) or tensor.is_quantized:
        return None
    tensor = tensor if is_plain else without_subclass(tensor)
    if tensor.layout == torch.sparse_coo:
        _, tensor = uncoalesced_parts(tensor)
    elif tensor.layout != torch.strided or tensor.is_nested:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    if not tensor.is_floating_point():
        return None
    if tensor.dtype.itemsize == 1:  # there are no norms of 8-bit floats
        tensor = tensor.detach().float()
    if not is_plain:
        torch.isfinite(tensor.detach())  # a subclass may refuse; better here than in the middle of a check
    return tensor


_GRADIENT = attrgetter("grad")
_KIND = attrgetter("dtype", "layout", "is_nested")
_PLAIN = frozenset((dtype, torch.strided, False) for dtype in (torch.float32, torch.float64, torch.bfloat16))
_PLACE = attrgetter("device", "dtype")
_DTYPE, _IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")


def gradients_of(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Return the optimizer's parameters that have gradients, and the values of these gradients, as two lists."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = list(map(_GRADIENT, parameters))
    # Asking each tensor for all that makes it special takes a microsecond or two; these take a tenth.
    if set(map(type, gradients)) == {Tensor} and set(map(_KIND, gradients)) <= _PLAIN:
        return parameters, gradients
    pairs = [(p, floats) for p in parameters if p.grad is not None and (floats := floats_of(p.grad)) is not None]
    return [parameter for parameter, _ in pairs], [floats for _, floats in pairs]


@torch.no_grad()
def norms_of(tensors: Sequence[Tensor], *, exact: bool = False) -> list[Tensor]:
    """Return the L2 norm of each tensor, as a list of 0-dim tensors. Runs one fused kernel per device and dtype.

    The norm of a tensor with NaN or Inf is never finite. The norm of large finite values may overflow to Inf, as for
    100 float32 values of 1e20. With `exact`, the values are squared in float64, so that this does not happen.
    """
    kinds, norms = list(map(_PLACE, tensors)), list(tensors)
    for kind in set(kinds):
        # A norm of float16 values would overflow above 65504.
        wide = torch.float64 if exact else torch.float32 if kind[1] == torch.float16 else None
        places = [place for place, other in enumerate(kinds) if other == kind]
        for place, norm in zip(places, l2_norm_of_each([tensors[place] for place in places], wide), strict=True):
            norms[place] = norm
    return norms


@torch.no_grad()
def measure(gradients: Sequence[Tensor], losses: Sequence[Tensor], *, exact: bool = False) -> Tensor | None:
    """Return each loss and the L2 norm of each gradient in one tensor, on the first gradient's device.

    The losses come first. None if there are no gradients and no losses. With `exact`, the norm of a finite gradient
    never overflows.
    """
    numbers = [*losses, *norms_of(gradients, exact=exact)]
    if not numbers:
        return None
    if len(set(map(_PLACE, numbers))) > 1:
        device = (gradients or losses)[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        numbers = [number.to(device, dtype, non_blocking=True) for number in numbers]
    return torch.stack(numbers)


# Below this, a kernel for each tensor costs more than to copy all into one.
_FEW_ELEMENTS = 2**16


@torch.no_grad()
def measure_and_read(gradients: Sequence[Tensor], losses: Sequence[Tensor]) -> list[float] | None:
    """Return each loss, then the L2 norm of each gradient, as a list of floats. Waits for the device.

    If all of them are finite, the list may hold a single norm over all gradients instead of one per gradient.
    """
    is_small = all(map(_IS_CPU, gradients)) and sum(map(Tensor.numel, gradients)) <= _FEW_ELEMENTS
    if is_small and len(set(map(_DTYPE, gradients))) == 1:
        flat = flattened(list(gradients))
        read = [*map(float, losses), math.sqrt(flat.dot(flat))]
        if all(map(math.isfinite, read)):
            return read
    numbers = measure(gradients, losses)
    values: list[float] | None = None if numbers is None else numbers.tolist()
    return values


@dataclass(frozen=True, slots=True)
class BadTensor:
    """A tensor with NaN or Inf, and the number of such elements. For a sharded tensor, only this rank's part counts."""

    name: str  # the parameter's or buffer's name
    n_nan: int | None  # the number of elements that are NaN; None where only the norm is known
    n_inf: int | None  # the number of elements that are Inf, likewise
    n_elements: int
    norm: float = math.nan  # the L2 norm: NaN if an element is NaN, else inf

    def __str__(self) -> str:
        if self.n_nan is None or self.n_inf is None:
            return f"{self.name} (holds {'NaN' if math.isnan(self.norm) else 'Inf'}, not counted)"
        kinds = [f"{n} {kind}" for n, kind in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if n]
        share = (self.n_nan + self.n_inf) / self.n_elements
        return f"{self.name} ({' and '.join(kinds)} of {self.n_elements}, {100 * share:.3g}%)"


def find_bad(named: Iterable[tuple[str, Tensor]]) -> list[BadTensor]:
    """Return the tensors that hold NaN or Inf, in the order given. Large finite values do not count."""
    pairs = [(name, floats) for name, tensor in named if (floats := floats_of(tensor)) is not None]
    if not pairs:
        return []
    norms = norms_of([floats for _, floats in pairs])
    # One wait. Unlike in `measure`, the first may be on the host, whose copies of the others have to have arrived.
    values = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).tolist()
    return count_bad([(*pair, value) for pair, value in zip(pairs, values, strict=True)])


def count_bad(measured: Sequence[tuple[str, Tensor, float]]) -> list[BadTensor]:
    """Return the tensors with NaN or Inf, given (name, values, norm) for each. A finite norm rules out both."""
    bad = []
    for name, floats, norm in measured:
        if math.isfinite(norm):
            continue
        n_nan, n_inf = int(floats.isnan().sum()), int(floats.isinf().sum())
        if n_nan or n_inf:
            bad.append(BadTensor(name, n_nan, n_inf, floats.numel(), norm))
    return bad


MAX_SAMPLES = 8  # of the bad ones, how many are listed


@dataclass(frozen=True, slots=True)
class BadInput:
    """A batch tensor that holds NaN or Inf."""

    name: str  # its place in the batch, such as ``batch["x"]``
    batch_idx: int
    n_nan: int
    n_inf: int
    n_elements: int
    samples: tuple[int, ...]  # the first positions along dimension 0 that are affected, one more than are listed
    is_mask: bool  # whether nothing in it is bad but -inf, which may be meant, as in attention masks
    counts: str = "sample"  # what dimension 0 counts: "row" where tensors differ in it, as in a batch of graphs

    def __str__(self) -> str:
        name = f"batch {self.batch_idx}" if self.name == "batch" else f"{self.name} of batch {self.batch_idx}"
        if self.is_mask:
            return f"{name} holds -Inf in {self.n_inf} of {self.n_elements} elements, as masks do"
        kinds = " and ".join(f"{n} {kind}" for n, kind in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if n)
        where = f", in {list_samples(self.samples, self.counts)}" if self.samples else ""
        return f"{name} holds {kinds} in {self.n_elements} elements{where}"


def list_samples(samples: Sequence[int], counts: str = "sample") -> str:
    """Return a string such as "sample 3" or "samples 3, 4"."""
    more = ", ..." if len(samples) > MAX_SAMPLES else ""
    return f"{counts}{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:MAX_SAMPLES]))}{more}"


def n_samples_of(batch: Any) -> int | None:
    """Return the number of samples: the size of dimension 0 if all tensors of the batch agree on it, else None."""
    lengths = {tensor.shape[0] for tensor in tensors_in(batch) if is_in_memory(tensor) and tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def bad_inputs(batch: Any, index: int) -> list[BadInput]:
    """Return the tensors with NaN or Inf in the batch with this index. Slow, because it waits for the device."""
    inputs, counts = [], "row" if n_samples_of(batch) is None else "sample"
    for name, tensor in named_tensors(batch, "batch"):
        floats = floats_of(tensor)
        if floats is None or not (bad := ~torch.isfinite(floats)).any():
            continue
        has_samples = floats.dim() > 0 and tensor.layout == torch.strided
        n_nan = int(floats.isnan().sum())
        samples = tuple(rows_with(bad, MAX_SAMPLES + 1)) if has_samples else ()
        is_mask = not n_nan and not bool(torch.isposinf(floats).any())
        n_inf = int(bad.sum()) - n_nan
        inputs.append(BadInput(name, index, n_nan, n_inf, floats.numel(), samples, is_mask, counts))
    return inputs
