"""The output of a language model's last layer, not computed yet, so that cross-entropy can compute it in chunks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memtools._torch import tensor_without_memory, without_torch_function, write_count
from lightning_memtools.checkpointing.chunked_cross_entropy import ChunkedCrossEntropy

if TYPE_CHECKING:
    from lightning_memtools.checkpointing.loss_head import DeferredHead

_SIGNATURE = inspect.signature(F.cross_entropy)


class DeferredLogits(Tensor):
    """Logits of a linear layer that are computed only when they are read, and never if only cross-entropy needs them.

    `F.cross_entropy` computes its loss from the layer's input. Changes of shape and elementwise operations such as
    `float()` are deferred as well. For any other function, the logits are computed.
    """

    recipe: _Recipe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer functions such as `size` without computing the logits. For other functions, compute them first."""
        del types
        kwargs = kwargs or {}
        if _asks_for_no_values(func) or (func is Tensor.register_hook and _is_our_own(*args[1:], **kwargs)):
            with without_torch_function():
                return func(*args, **kwargs)
        is_first = bool(args) and isinstance(args[0], DeferredLogits)
        if is_first and func is F.cross_entropy:
            args[0].recipe.head.n_losses += 1
        if is_first and (func in _VIEWS or not args[0].recipe.is_real):
            answer = _answer(args[0].recipe, func, args, kwargs)
            if answer is not None:
                return answer
        return func(*_read(args, func), **_read(kwargs, func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the logits and run an operator on them. Called from torch's C++ code, below autograd."""
        del types
        return func(*_read(args, func), **_read(kwargs or {}, func))


@dataclass(eq=False, slots=True)
class _Recipe:
    """Describes how to compute deferred logits, all at once or in chunks.

    Attributes:
        inputs: The input, weights and bias of the linear layer.
        source: The layer's input, with all changes of shape that were applied to the logits.
        class_dim: The index of the class dimension.
        dtypes: The dtype that the layer computes in, and the dtype of the logits.
        head: The object that replaces the layer's forward, and is told if the logits are read or go into a loss.
        version: The version counter of the layer's weights when the layer was called.
        autocast: Whether autocast was on when the layer was called, and its dtype.
        steps: The elementwise operations applied to the layer's output so far.
        parent: The recipe for the logits before the last operation; None if there was no operation yet.
        change: The last operation, which is applied to the logits of `parent`; None if there was none.
        real: The computed logits; None while they are still deferred.
    """

    inputs: tuple[Tensor, Tensor, Tensor | None]
    source: Tensor
    class_dim: int
    dtypes: tuple[torch.dtype, torch.dtype]
    head: DeferredHead
    version: int
    autocast: tuple[bool, torch.dtype]
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    parent: _Recipe | None = None
    change: Callable[[Tensor], Tensor] | None = None
    real: Tensor | None = None

    @property
    def shape(self) -> list[int]:
        """The shape of the logits."""
        shape = list(self.source.shape)
        shape[self.class_dim] = len(self.inputs[1])
        return shape

    @property
    def is_real(self) -> bool:
        """True if these logits, or others that they are computed from, have been computed already."""
        return self.real is not None or (self.parent is not None and self.parent.is_real)

    def all_logits(self) -> Tensor:
        """Return the logits, with an autograd graph. The first call computes them; later calls return the same.

        Raises:
            RuntimeError: The weights have changed since the layer was called.
        """
        if self.real is None:
            source, weight, bias = self.inputs
            if write_count(weight) != self.version:
                raise RuntimeError(
                    "These logits were left out while the loss was computed, and the weights that make them have "
                    "changed since. Read them before the optimizer's step, or set "
                    'GradientCheckpointing(loss_head="keep").'
                )
            enabled, dtype = self.autocast
            with torch.enable_grad(), torch.autocast(source.device.type, dtype=dtype, enabled=enabled):
                if self.parent is None:
                    self.real = F.linear(source, weight, bias)
                else:
                    assert self.change is not None
                    self.real = self.change(self.parent.all_logits())
        return self.real

    def deferred(self) -> Tensor:
        """Return a tensor that stands for these logits. They are only computed when the tensor is read."""
        made: Tensor = _Deferred.apply(self, *self.inputs)  # type: ignore[no-untyped-call]
        return made


def deferred_linear(source: Tensor, weight: Tensor, bias: Tensor | None, head: DeferredHead) -> Tensor:
    """Return the output of a linear layer as a tensor that is computed only when it is read.

    Args:
        source: The input, of shape (..., width).
        weight: The weights, of shape (classes, width).
        bias: The bias, of shape (classes,), or None.
        head: The object that replaces the layer's forward, and is told if the output is read or goes into a loss.
    """
    kind = source.device.type
    autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    dtype = autocast[1] if autocast[0] else source.dtype
    inputs = source, weight, bias
    recipe = _Recipe(inputs, source, source.dim() - 1, (dtype, dtype), head, write_count(weight), autocast)
    return recipe.deferred()


class _Deferred(torch.autograd.Function):
    """The autograd function that creates deferred logits, so that gradients flow back through them."""

    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, *inputs: Any) -> Tensor:
        """Return a placeholder that has the shape of the logits but takes no memory."""
        ctx.recipe, ctx.inputs = recipe, inputs
        made: DeferredLogits = tensor_without_memory(DeferredLogits, recipe.shape, recipe.dtypes[1], inputs[0].device)
        made.recipe = recipe
        return made

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        """Compute the linear layer now, and return the gradients of its input, weights and bias."""
        needed = ctx.needs_input_grad[1:]
        wanted = [each for each, is_needed in zip(ctx.inputs, needed, strict=True) if is_needed]
        gradients = iter(torch.autograd.grad(ctx.recipe.all_logits(), wanted, upstream, retain_graph=True))
        return None, *(next(gradients) if is_needed else None for is_needed in needed)


def _asks_for_no_values(func: Any) -> bool:
    """Return True if a function or attribute getter only needs a tensor's metadata, such as its shape or dtype."""
    attribute = getattr(func, "__self__", None) if getattr(func, "__name__", "") == "__get__" else None
    return func in _OF_SHAPES or (attribute is not None and attribute.__name__ not in _VALUES)


def _is_our_own(hook: Any) -> bool:
    """Return True if a gradient hook comes from this package. Such hooks only record when a layer's backward begins.

    Logits that are never computed get no gradient. These hooks may then be skipped, but a user's hooks may not.
    """
    return str(getattr(hook, "func", hook).__module__).startswith(__name__.partition(".")[0])


def _read(values: Any, func: Any) -> Any:
    """Return the arguments `values` of `func`, with deferred logits (also in lists and dicts) replaced by real ones."""
    if isinstance(values, DeferredLogits):
        recipe = values.recipe
        if not recipe.is_real:
            recipe.head.on_read(getattr(func, "__name__", str(func)))
        return recipe.all_logits()
    if isinstance(values, dict):
        return {key: _read(value, func) for key, value in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)([_read(value, func) for value in values])
    return values


def _answer(recipe: _Recipe, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of `func` without computing the logits; None if the function cannot do without them."""
    if func is F.cross_entropy:
        return _loss(recipe, *args, **kwargs)
    if func in _VIEWS:
        return _viewed(recipe, func, args[1:], kwargs)
    if func in _ELEMENTWISE and not any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values())):
        return _changed(recipe, func, args[1:], kwargs)
    return None


def _loss(recipe: _Recipe, *args: Any, **kwargs: Any) -> Tensor | None:
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    options, source = given.arguments, recipe.source
    target = options["target"]
    has_classes = not isinstance(target, DeferredLogits) and not target.is_floating_point()
    is_known = options["reduction"] in {"mean", "sum", "none"}  # torch says what is wrong with any other
    old_reduction = options["size_average"] is not None or options["reduce"] is not None
    if not has_classes or not is_known or old_reduction or recipe.class_dim != min(1, source.dim() - 1):
        return None
    loss = ChunkedCrossEntropy(
        target.reshape(-1),
        recipe.steps,
        recipe.dtypes[0],
        options["weight"],
        options["reduction"],
        options["ignore_index"],
        options["label_smoothing"],
    )
    source = source.movedim(recipe.class_dim, -1)
    if target.shape != source.shape[:-1]:
        return None  # torch says what is wrong with it
    _, weight, bias = recipe.inputs
    out = loss(source.reshape(-1, source.shape[-1]), weight, bias)
    return out.view(target.shape) if loss.reduction == "none" else out


def _viewed(recipe: _Recipe, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a view function to deferred logits, and return deferred logits; None unless rows keep all classes."""
    source, dim, last = recipe.source, recipe.class_dim, recipe.source.dim() - 1
    if func in _RESHAPES:
        made = func(torch.empty(recipe.shape, dtype=recipe.dtypes[1], device="meta"), *args, **kwargs)
        shape = list(made.shape)
        if dim != last or not shape or shape[-1] != recipe.shape[-1] or made.dtype != recipe.dtypes[1]:
            return None
        source, dim = source.reshape(*shape[:-1], source.shape[-1]), len(shape) - 1
    elif func is Tensor.__getitem__:
        if dim != last or not _leaves_last_whole(args[0], source.dim()):
            return None
        source = source[args[0]]
        dim = source.dim() - 1
    elif func is not Tensor.contiguous:
        # Where dimensions change places, a tensor of as many dimensions tells by its one long one where the classes go.
        shape = [1] * source.dim()
        shape[dim] = 2
        dim = list(func(torch.empty(shape, device="meta"), *args, **kwargs).shape).index(2)
        source = func(source, *args, **kwargs)
    change = partial(_call, func, args, kwargs)
    return replace(recipe, source=source, class_dim=dim, parent=recipe, change=change, real=None).deferred()


def _leaves_last_whole(index: Any, n_dims: int) -> bool:
    """Return True if indexing with `index` keeps the last of `n_dims` dimensions whole."""
    keys = index if isinstance(index, tuple) else (index,)
    if any(isinstance(key, list) for key in keys):
        return False
    dots = [at for at, key in enumerate(keys) if key is Ellipsis]
    taken = sum(
        key.dim() if isinstance(key, Tensor) and key.dtype == torch.bool else 1
        for key in keys
        if key is not None and key is not Ellipsis
    )
    if taken < n_dims and (not dots or dots[0] == len(keys) - 1):
        return True
    last = keys[-1]
    return isinstance(last, slice) and last == slice(None)


def _changed(recipe: _Recipe, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an elementwise function to deferred logits. Return deferred logits, or a string for `logits.type()`.

    Return None if the result would not be floating-point, or would be on another device.
    """
    step = partial(_call, func, args, kwargs)
    empty = step(torch.empty(0, dtype=recipe.dtypes[1], device=recipe.source.device))
    if isinstance(empty, str):
        return empty
    if empty.device != recipe.source.device or not empty.is_floating_point():
        return None
    dtypes = recipe.dtypes[0], empty.dtype
    return replace(recipe, steps=(*recipe.steps, step), dtypes=dtypes, parent=recipe, change=step, real=None).deferred()


def _call(func: Any, args: Any, kwargs: Any, logits: Tensor) -> Tensor:
    made: Tensor = func(logits, *args, **kwargs)
    return made


_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}
_VIEWS = _RESHAPES | {
    Tensor.__getitem__,
    Tensor.contiguous,
    Tensor.transpose,
    torch.transpose,
    Tensor.permute,
    torch.permute,
    Tensor.movedim,
    torch.movedim,
}
_ELEMENTWISE = {
    Tensor.to,
    Tensor.type,
    Tensor.float,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.double,
    Tensor.mul,
    torch.mul,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.div,
    torch.div,
    Tensor.__truediv__,
    Tensor.tanh,
    torch.tanh,
}
_OF_SHAPES = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.untyped_storage,
    Tensor.__len__,
    Tensor.__hash__,
    torch.numel,
    torch.is_floating_point,
}
# Of a tensor's attributes, those that hold its values or its gradient's, or are views of it.
_VALUES = {"data", "grad", "T", "H", "mT", "mH", "real", "imag"}
