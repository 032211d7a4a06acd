"""A linear layer and cross-entropy in chunks of rows, so that all logits never exist at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_ROWS = 256  # fewer leave a GPU idle


def chunk_rows(width: int) -> int:
    """Return the number of rows per chunk for a linear layer with `width` inputs.

    The logits of a chunk take half as much memory as the layer's weights. Smaller chunks would be slow, since the
    weights are read, and their gradient is written, once per chunk.
    """
    return max(width // 2, _LEAST_ROWS)


@dataclass(frozen=True, slots=True)
class ChunkedCrossEntropy:
    """Computes the cross-entropy of a linear layer's output in chunks, with the options of `F.cross_entropy`.

    The layer's gradients are computed during the forward pass, chunk by chunk, so that nothing is computed twice.
    There are two exceptions, for which logits are computed again in backward: in float16 an unscaled gradient would
    underflow, and with reduction="none" the upstream gradient is not known in forward.

    Attributes:
        target: The class of each row.
        steps: The elementwise operations on the logits between the layer and the loss.
        dtype: The dtype that the layer computes in.
        class_weight: A weight for each class, or None.
        reduction: "mean", "sum" or "none".
        ignore_index: The class of rows that are ignored.
        label_smoothing: The fraction of the target that is spread evenly over all classes.
    """

    target: Tensor
    steps: Sequence[Callable[[Tensor], Tensor]]
    dtype: torch.dtype
    class_weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __call__(self, source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the loss: a scalar tensor, or one value per row. If there are no rows, return what torch returns.

        Args:
            source: The input of the linear layer, of shape (rows, width).
            weight: The weights of the layer, of shape (classes, width).
            bias: The bias of the layer, of shape (classes,), or None.
        """
        if not len(source):
            return self.at_once(source, weight, bias)
        loss: Tensor = _Chunks.apply(self, source, weight, bias)  # type: ignore[no-untyped-call]
        return loss

    def at_once(self, source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the same loss as `__call__`, but computed from all logits at once, with ordinary autograd."""
        cast = [None if one is None else one.to(self.dtype) for one in (source, weight, bias)]
        losses = self._losses(F.linear(*cast), self.target)  # type: ignore[arg-type]
        return (
            losses if self.reduction == "none" else self._reduced(losses.sum(dtype=_wide(losses.dtype)), losses.dtype)
        )

    def run(
        self, inputs: Sequence[Any], upstream: Tensor | None = None, needed: Sequence[bool] = ()
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss. If its gradient `upstream` is given, also return gradients of inputs flagged in `needed`."""
        source, weight, bias = inputs
        losses: list[Tensor] = []
        gradients = [
            None if upstream is None or not wanted else torch.zeros_like(one)
            for one, wanted in zip(inputs, needed or (False,) * 3, strict=True)
        ]
        cast_weight, cast_bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        if upstream is not None:
            upstream = upstream.to(_wide(self.dtype))
            upstream = upstream / self._n_counted() if self.reduction == "mean" else upstream
        # Hooks of the code around are for what it keeps itself: a chunk is over before they could serve.
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            for start in range(0, len(source), chunk_rows(source.shape[1])):
                rows = slice(start, start + chunk_rows(source.shape[1]))
                part = source[rows].to(self.dtype)
                logits = F.linear(part, cast_weight, cast_bias)
                if upstream is None:
                    found = self._losses(logits, self.target[rows])
                else:
                    of_rows = upstream[rows] if self.reduction == "none" else upstream
                    found, logits = self._with_gradient(logits, self.target[rows], of_rows)
                    _add_products(gradients, rows, part, cast_weight, logits)
                losses.append(found if self.reduction == "none" else found.sum(dtype=_wide(found.dtype)))
        if self.reduction == "none":
            return torch.cat(losses), gradients
        return self._reduced(torch.stack(losses).sum(), found.dtype), gradients

    def _with_gradient(self, logits: Tensor, target: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each row, and the gradient of the logits. This takes half the memory that torch needs.

        The gradient is computed as softmax(logits) * sum(targets) - targets, times `upstream`. The targets include
        label smoothing and class weights.
        """
        with torch.enable_grad():
            changed = logits.requires_grad_()
            for step in self.steps:
                changed = step(changed)
        values, counted = changed.detach(), target != self.ignore_index
        target = target.where(counted, 0)[:, None]
        wide = values.new_empty(0, dtype=_wide(values.dtype))
        weight = wide.new_ones(values.shape[1]) if self.class_weight is None else self.class_weight.to(wide.dtype)
        of_target = (1 - self.label_smoothing) * weight[target]
        of_all = self.label_smoothing / len(weight) * weight
        share = of_target + of_all.sum()
        total = values.to(wide.dtype).logsumexp(1, keepdim=True)
        losses = share * total - of_target * values.gather(1, target)
        if self.label_smoothing:
            losses -= (values.to(wide.dtype) @ of_all)[:, None]
        gradient = values.softmax(1, dtype=wide.dtype).mul_(share)
        if self.label_smoothing:
            gradient -= of_all
        gradient.scatter_add_(1, target, -of_target)
        gradient.mul_(torch.where(counted, upstream, 0)[:, None])
        if changed is not logits:
            (gradient,) = torch.autograd.grad(changed, logits, gradient.to(changed.dtype))
        return losses[:, 0].where(counted, 0).to(self._dtype_of_losses(values)), gradient.to(logits.dtype)

    def _dtype_of_losses(self, logits: Tensor) -> torch.dtype:
        """Return the dtype that `F.cross_entropy` would return for these logits, which depends on autocast."""
        return F.cross_entropy(logits.new_zeros(1, 2), self.target.new_zeros(1)).dtype

    def _losses(self, logits: Tensor, target: Tensor) -> Tensor:
        for step in self.steps:
            logits = step(logits)
        return F.cross_entropy(
            logits,
            target,
            weight=self.class_weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )

    def _reduced(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return (total if self.reduction == "sum" else total / self._n_counted()).to(dtype)

    def _n_counted(self) -> Tensor:
        """Return what a mean loss is divided by: the number of rows not ignored, or the sum of their class weights."""
        counted = self.target != self.ignore_index
        if self.class_weight is None:
            return counted.sum()
        return (self.class_weight[self.target.where(counted, 0)] * counted).sum()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize > 2 else torch.float32  # noqa: PLR2004, two bytes are half a float


def _add_products(
    gradients: Sequence[Tensor | None], rows: slice, source: Tensor, weight: Tensor, logits: Tensor
) -> None:
    """Add a chunk's part to the gradients of input, weight and bias. `logits` is the gradient of the logits."""
    of_source, of_weight, of_bias = gradients
    if of_source is not None:
        of_source[rows] = logits @ weight
    if of_weight is not None and of_weight.dtype == logits.dtype:
        torch.addmm(of_weight, logits.t(), source, out=of_weight)  # torch counts the operations of this form
    elif of_weight is not None:
        of_weight += logits.t() @ source
    if of_bias is not None:
        of_bias += logits.sum(0)


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: ChunkedCrossEntropy, *inputs: Any) -> Tensor:
        """Return the loss. If possible, also compute the gradients of the inputs and save them for backward."""
        ctx.loss, ctx.gradients = loss, None
        ctx.device_type = inputs[0].device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.device_type), torch.get_autocast_dtype(ctx.device_type)
        ctx.save_for_backward(*inputs)
        needed = ctx.needs_input_grad[1:]
        if not any(needed) or loss.reduction == "none" or loss.dtype == torch.float16:
            return loss.run(inputs)[0]
        found, ctx.gradients = loss.run(inputs, torch.ones((), device=inputs[0].device), needed)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        """Return the gradients of the inputs. If the forward pass did not save them, compute them now."""
        gradients, ctx.gradients = ctx.gradients, None
        needed = ctx.needs_input_grad[1:]
        inputs = ctx.saved_tensors
        enabled, dtype = ctx.autocast
        with torch.autocast(ctx.device_type, dtype=dtype, enabled=enabled):
            if torch.is_grad_enabled():  # gradients of gradients
                wanted = [one for one, is_needed in zip(inputs, needed, strict=True) if is_needed]
                out = ctx.loss.at_once(*inputs)
                found = iter(torch.autograd.grad(out, wanted, upstream, create_graph=True))
                return None, *(next(found) if is_needed else None for is_needed in needed)
            if gradients is None:
                return None, *ctx.loss.run(inputs, upstream[0], needed)[1]
        return None, *(None if one is None else one.mul_(upstream[0]) for one in gradients)
