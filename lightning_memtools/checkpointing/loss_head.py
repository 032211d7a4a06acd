"""Traces a language model's step as if its loss were computed in chunks, without all logits in memory at once.

Logits of a vocabulary of 50,000 words take more than all blocks of a model that is recomputed: they are there once as
such, once as log-probabilities, and once as a gradient. No checkpointing helps, but
`torch.nn.functional.linear_cross_entropy` does, which never makes all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.memory_model import ChainPlan
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.patches import Patches
from lightning_memtools.simulation.step_trace import StepCost, TracedStep, tracing

_LEAST_CLASSES = 8192
"""The smallest vocabulary that is looked at: the classes of pictures are fewer, and their logits small."""

CODE = (
    "torch.nn.functional.linear_cross_entropy(hidden, lm_head.weight, labels, "
    "options=torch.nn.LinearCrossEntropyOptions())"
)
_SIGNATURE = inspect.signature(F.cross_entropy)


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """The step of a language model whose loss is computed in chunks.

    Attributes:
        rows: The number of predictions.
        classes: The size of the vocabulary.
        logits_bytes: The bytes of all logits, once.
        cost: The memory and operations of the step with the loss in chunks.
    """

    rows: int
    classes: int
    logits_bytes: int
    cost: StepCost

    def note(self, peak_bytes: int) -> str:
        """Return in a line what the logits take and what another loss would save of a step's peak."""
        return (
            f"the logits ({self.rows:,} x {self.classes:,}) take {format_size(self.logits_bytes)} for each copy; with "
            f"{CODE} in place of the linear layer and cross_entropy the peak is {format_size(self.cost.peak_bytes)} "
            f"instead of {format_size(peak_bytes)} (traced)"
        )


def may_have_large_logits(model: nn.Module) -> bool:
    """Return whether a model has a layer for a large vocabulary, and torch a loss that needs no logits of it."""
    return hasattr(F, "linear_cross_entropy") and any(
        isinstance(part, nn.Linear) and part.out_features >= _LEAST_CLASSES for part in model.modules()
    )


def step_with_chunked_loss(step: TracedStep, plans: Sequence[ChainPlan] = ()) -> ChunkedLoss | None:
    """Return the step, under a plan, with its loss in chunks; None without such a loss, or such a function of torch.

    It has one where a linear layer of 8,192 outputs or more is followed by `cross_entropy`, with nothing between them
    but changes of type and shape.
    """
    if not may_have_large_logits(step.model):
        return None
    with tracing(step) as trace, AppliedPlan(trace.model, plans), _LossInChunks(trace.device) as loss:
        trace.run()
        if loss.n_chunked != 1:
            return None
        loss.forget()
        return ChunkedLoss(*loss.shape, loss.logits_bytes, trace.run())


class _LossInChunks(TorchFunctionMode):
    """While entered, logits take no memory, and cross_entropy of them is computed from what they were made of."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.n_chunked = 0
        self.shape = (0, 0)
        self.logits_bytes = 0
        self._device = device
        self._patches = Patches()
        # The logits and what was made of them, by id, with the arguments of the linear layer.
        self._logits: dict[int, tuple[Tensor, Any]] = {}

    def __enter__(self) -> Self:
        self._patches.replace(F, "linear", lambda original: partial(self._linear, original))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.undo()
        self.forget()

    def forget(self) -> None:
        """Let go of the logits of a step that has ended, and of what they were made of."""
        self._logits.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function: aside if it is one of logits, or in another way if it is their loss."""
        kwargs = kwargs or {}
        made_of = next((known[1] for one in tensors_in((args, kwargs)) if (known := self._logits.get(id(one)))), None)
        if made_of is None:
            return func(*args, **kwargs)
        if func is F.cross_entropy:
            given = _SIGNATURE.bind(*args, **kwargs)
            given.apply_defaults()
            found = self._chunked(made_of, given.arguments)
            if found is not None:
                return found
        return self._aside(made_of, func, *args, **kwargs)

    def _linear(self, original: Any, source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if weight.shape[0] < _LEAST_CLASSES or not torch.is_grad_enabled():
            return original(source, weight, bias)
        return self._aside((source, weight, bias), original, source, weight, bias)

    def _aside(self, made_of: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function whose results take no memory and have no gradient, and note that these are logits."""
        with self._device.host(), torch.no_grad():
            out = func(*args, **kwargs)
        for one in tensors_in(out):
            self._logits[id(one)] = one, made_of
        return out

    def _chunked(self, made_of: Any, given: dict[str, Any]) -> Tensor | None:
        """Return cross_entropy without the logits, as far as linear_cross_entropy can compute it; else None."""
        source, head, bias = made_of
        logits, target = given["input"], given["target"]
        if given["label_smoothing"] or target.is_floating_point():
            return None
        classes, width = head.shape
        rows = logits.numel() // classes
        source, head = source.reshape(-1, width)[:rows].to(logits.dtype), head.to(logits.dtype)
        options = torch.nn.LinearCrossEntropyOptions(acc_policy="compact", chunking_method="aspect_ratio:2")
        loss: Tensor = F.linear_cross_entropy(
            source,
            head,
            target.reshape(-1),
            linear_bias=bias,
            weight=given["weight"],
            reduction=given["reduction"],
            ignore_index=given["ignore_index"],
            options=options,
        )
        # A fake tensor's kernel makes what it returns only, not the logits of one chunk: a row for each of its columns.
        torch.empty(max(rows * width // 2, classes), dtype=torch.float32, device=source.device)
        self.n_chunked += 1
        self.shape, self.logits_bytes = (rows, classes), rows * classes * logits.element_size()
        return loss
