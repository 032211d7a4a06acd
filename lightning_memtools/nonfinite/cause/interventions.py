"""What a step is run with instead, to see whether that is what makes it bad: other samples, wider numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in
from lightning_memtools.nonfinite.cause.operation_trace import in_backward, newest_node, node_in_backward
from lightning_memtools.nonfinite.micro_batches import list_samples
from lightning_memtools.nonfinite.step_rerun import CannotRerunError, Rerun
from lightning_memtools.nonfinite.tensor_names import named_tensors

_NARROWER = {
    torch.float32: {torch.float16, torch.bfloat16},
    torch.float64: {torch.float16, torch.bfloat16, torch.float32},
}


def n_samples_of(batch: Any) -> int | None:
    """The length of dimension 0 that the batch's tensors share; None where they differ or have none."""
    lengths = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() and tensor.layout == torch.strided}
    return lengths.pop() if len(lengths) == 1 else None


def with_other_samples(batch: Any, samples: Sequence[int]) -> tuple[Any, int] | None:
    """The batch with the first good sample in the place of some, and which that is; None where none is good."""
    n_samples = n_samples_of(batch)
    bad = set(samples)
    good = next((index for index in range(n_samples or 0) if index not in bad), None)
    if good is None or not bad:
        return None

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.layout != torch.strided:
            return tensor
        changed = tensor.detach().clone()
        changed[list(bad)] = changed[good].clone()
        return changed.requires_grad_(tensor.requires_grad)

    return map_tensors(batch, change), good


def cleaned(batch: Any) -> tuple[Any, str]:
    """The batch without NaN and Inf, and how they were replaced: by whole good samples where there are some, else by 0.

    Tensors that hold 0 and -inf alone are masks, and stay.
    """
    bad: set[int] = set()
    for _, tensor in named_tensors(batch, "batch"):
        if tensor.is_floating_point() and tensor.dim() and tensor.layout == torch.strided and not _is_mask(tensor):
            bad.update((~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[:, 0].tolist() if tensor.dim() > 1
                       else (~torch.isfinite(tensor)).nonzero()[:, 0].tolist())  # fmt: skip
    changed = with_other_samples(batch, sorted(bad))
    if changed is not None:
        return changed[0], f"with sample {changed[1]} in the place of {list_samples(sorted(bad))}"

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.layout != torch.strided or _is_mask(tensor):
            return tensor
        return torch.nan_to_num(tensor.detach(), 0.0, 0.0, 0.0).requires_grad_(tensor.requires_grad)

    return map_tensors(batch, fill), "with 0 in the place of NaN and Inf"


def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == -torch.inf)).all())


def widened_batch(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating point numbers in a wider type."""
    return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.dtype in _NARROWER[dtype] else tensor)


@contextmanager
def wide(module: Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute everything in a wider type, weights and buffers included, whatever the code asks for.

    The weights and buffers themselves are not written: others take their place meanwhile.
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
        with torch.compiler.set_stance("force_eager"), _Wide(dtype):
            yield
    finally:
        torch.set_default_dtype(default)
        for tensor, data in kept:
            if isinstance(tensor, torch.nn.Parameter):
                tensor.grad = None
            tensor.data = data


@contextmanager
def mended(number: int) -> Iterator[None]:
    """Put 0 in the place of NaN and Inf in what one operation of the step gives, and in what its backward gives.

    Args:
        number: Its place in the order of operations, as `Trace` counts them.
    """
    with torch.compiler.set_stance("force_eager"), _Mended(number):
        yield


class _Mended(TorchDispatchMode):
    """Counts operations as `Trace` does."""

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = number
        self._node: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == 0 and not in_backward():
            self._node = newest_node()
        out = func(*args, **(kwargs or {}))
        if self._left == 0 or (self._node is not None and in_backward() and node_in_backward() == self._node):
            for tensor in tensors_in(out):
                if tensor.is_floating_point() and tensor.layout == torch.strided:
                    tensor.nan_to_num_(0.0, 0.0, 0.0)
        return out


class _Wide(TorchDispatchMode):
    """Has every operation compute in a wider type. Below autocast, whose casts it turns around too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        narrow = _NARROWER[self._dtype]
        written = {
            argument.name for argument in func._schema.arguments  # noqa: SLF001, no public way tells
            if argument.alias_info is not None and argument.alias_info.is_write
        }  # fmt: skip

        def widen(each: Any) -> Any:
            if isinstance(each, Tensor):
                return each.to(self._dtype) if each.dtype in narrow else each
            return self._dtype if each in narrow else each

        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001, as above
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


def try_rates(rerun: Rerun, rate: float) -> str:
    """Try an SGD update with this rate, a tenth of it, and so on; what came out, as a sentence, or empty.

    An update that makes the loss of its own batch larger has gone too far. Float64, because the loss of a run that has
    diverged is beyond float32.
    """
    batches = {i: widened_batch(micro.batch, torch.float64) for i, micro in enumerate(rerun.micro)}
    rerun.reset()
    found: list[tuple[float, float]] = []
    try:
        # What `wide` puts in the place of the weights is dropped at its end, with what is done to it here.
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
