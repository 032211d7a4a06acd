"""Changes to a step that test a cause: other samples, wider types, an operation without NaN, smaller rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_memtools._torch import (
    DispatchMode,
    autograd_sequence_number,
    has_readable_values,
    in_backward,
    is_in_memory,
    node_in_backward,
    operator_schema,
    tree_map_only,
)
from lightning_memtools.memory.nested_tensors import map_tensors, named_tensors, tensors_in
from lightning_memtools.nonfinite.bad_step import list_samples
from lightning_memtools.nonfinite.finite_checks import is_mask, rows_with
from lightning_memtools.nonfinite.step_rerun import CannotRerunError, StepRerun

_NARROWER = {
    torch.float32: {torch.float16, torch.bfloat16},
    torch.float64: {torch.float16, torch.bfloat16, torch.float32},
}


def n_samples_of(batch: Any) -> int | None:
    """Return the length of dimension 0 that the batch's tensors share; None where they differ or have none."""
    lengths = {tensor.shape[0] for tensor in tensors_in(batch) if is_in_memory(tensor) and tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def with_other_samples(batch: Any, samples: Sequence[int]) -> tuple[Any, int] | None:
    """Return the batch with a good sample in the place of some, and that sample's index; None if none is good."""
    n_samples = n_samples_of(batch)
    bad = set(samples)
    good = next((index for index in range(n_samples or 0) if index not in bad), None)
    if good is None or not bad:
        return None

    def change(tensor: Tensor) -> Tensor:
        if not is_in_memory(tensor) or not tensor.dim():
            return tensor
        changed = tensor.detach().clone()
        changed[list(bad)] = changed[good].clone()
        return changed.requires_grad_(tensor.requires_grad)

    return map_tensors(batch, change), good


def cleaned(batch: Any) -> tuple[Any, str]:
    """Return the batch without NaN and Inf, and how they were replaced: by good samples if there are some, else by 0.

    Tensors that hold only 0 and -inf are masks and are not changed.
    """
    bad: set[int] = set()
    for _, tensor in named_tensors(batch, "batch"):
        if is_in_memory(tensor) and tensor.is_floating_point() and tensor.dim() and not is_mask(tensor):
            bad.update(rows_with(~torch.isfinite(tensor)))
    changed = with_other_samples(batch, sorted(bad))
    if changed is not None:
        return changed[0], f"with sample {changed[1]} in the place of {list_samples(sorted(bad))}"

    def fill(tensor: Tensor) -> Tensor:
        if not is_in_memory(tensor) or not tensor.is_floating_point() or is_mask(tensor):
            return tensor
        return torch.nan_to_num(tensor.detach(), 0.0, 0.0, 0.0).requires_grad_(tensor.requires_grad)

    return map_tensors(batch, fill), "with 0 in the place of NaN and Inf"


def widened_batch(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating point numbers in a wider type."""
    return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.dtype in _NARROWER[dtype] else tensor)


@contextmanager
def wide(module: Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute everything in a wider type, weights and buffers included, whatever the code asks for.

    The weights and buffers themselves are not written: copies replace them while the context lasts.
    """
    narrow = _NARROWER[dtype]
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    kept = [(tensor, tensor.data) for tensor in tensors if tensor.dtype in narrow]
    default = torch.get_default_dtype()
    try:
        for tensor, data in kept:
            tensor.data = data.to(dtype)
        if default in narrow:
            torch.set_default_dtype(dtype)
        with torch.compiler.set_stance("force_eager"), _WiderDtype(dtype):
            yield
    finally:
        torch.set_default_dtype(default)
        for tensor, data in kept:
            if isinstance(tensor, torch.nn.Parameter):
                tensor.grad = None
            tensor.data = data


@contextmanager
def nonfinite_zeroed(number: int) -> Iterator[None]:
    """Replace NaN and Inf by 0 in the outputs of one operation of the step, and in those of its backward."""
    with torch.compiler.set_stance("force_eager"), _ZeroBadValues(number):
        yield


class _ZeroBadValues(DispatchMode):
    """Counts operations as `OperationTrace` does."""

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = number
        self._node: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == 0 and not in_backward():
            self._node = autograd_sequence_number() - 1
        out = func(*args, **(kwargs or {}))
        if self._left == 0 or (self._node is not None and in_backward() and node_in_backward() == self._node):
            for tensor in tensors_in(out):
                if tensor.is_floating_point() and is_in_memory(tensor):
                    tensor.nan_to_num_(0.0, 0.0, 0.0)
        return out


class _WiderDtype(DispatchMode):
    """Makes every operation compute in a wider type. It runs below autocast and reverses its casts too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        narrow = _NARROWER[self._dtype]
        written = {
            argument.name for argument in operator_schema(func).arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }  # fmt: skip

        def widen(each: Any) -> Any:
            if isinstance(each, Tensor):
                return each.to(self._dtype) if each.dtype in narrow and has_readable_values(each) else each
            return self._dtype if each in narrow else each

        names = [argument.name for argument in operator_schema(func).arguments]
        args = tuple(
            arg if name in written else tree_map_only((Tensor, torch.dtype), widen, arg)
            for name, arg in zip(names, args, strict=False)
        )
        kwargs = {
            name: arg if name in written else tree_map_only((Tensor, torch.dtype), widen, arg)
            for name, arg in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


_SMALLEST = 8  # powers of ten below the present rate


def try_rates(rerun: StepRerun, rate: float) -> str:
    """Try an SGD update with this rate, a tenth of it, and so on; return the result as a sentence, or "".

    An update that makes the loss of its own batch larger has gone too far. Float64, because the loss of a run that has
    diverged is beyond float32.
    """
    batches = {i: widened_batch(micro.batch, torch.float64) for i, micro in enumerate(rerun.micro)}
    rerun.reset()
    found: list[tuple[float, float]] = []
    try:
        # `wide` drops its copies of the weights at its end, and with them the updates that are made here.
        with wide(rerun.module, torch.float64):
            outcome = rerun.run(batches=batches, restore=False)
            loss = sum(float(each) for each in outcome.losses)
            if not math.isfinite(loss):
                return ""
            parameters = {rerun.names[id(p)]: p for p in rerun.module.parameters()}
            moves = [(parameters[name], parameters[name].data, g.clone()) for name, g in outcome.gradients.items()]
            for power in range(_SMALLEST + 1):
                tried = rate / 10**power
                for parameter, start, gradient in moves:
                    parameter.data = start - tried * gradient
                after = sum(float(each) for each in rerun.run(batches=batches, restore=False).losses)
                found.append((tried, after / loss if loss else math.nan))
                if after < loss:
                    break
    except CannotRerunError:
        return ""
    (_, factor), (good, lowered) = found[0], found[-1]
    if len(found) == 1 or not lowered < 1:
        return ""
    return (
        f"an update at the rate {rate:g} multiplies the loss of this batch by {factor:.3g}, one at {good:g} lowers it"
    )
