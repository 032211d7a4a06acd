"""From a bad step to its cause: run again, traced, sliced, and tried out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memtools.memory.oom import is_out_of_memory
from lightning_memtools.nonfinite.batches import bad_inputs, named_tensors
from lightning_memtools.nonfinite.cause.advice import advice_for
from lightning_memtools.nonfinite.cause.changes import cleaned, n_samples_of, wide, widened_batch, with_other_samples
from lightning_memtools.nonfinite.cause.rates import try_rates
from lightning_memtools.nonfinite.cause.slices import UNKNOWN, Leaf, Origin, Root, find_root
from lightning_memtools.nonfinite.cause.trace import Memory, Trace
from lightning_memtools.nonfinite.cause.wording import describe_root, list_samples
from lightning_memtools.nonfinite.confirm import find_bad
from lightning_memtools.nonfinite.diagnose import Cause
from lightning_memtools.nonfinite.names import plain_name
from lightning_memtools.nonfinite.rerun.rerun import CannotRerunError, Outcome, Rerun

_SMALLEST_WEIGHTS = 6  # powers of ten


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What is known of the step without running it again.

    Attributes:
        grown: What had grown before it, as text; empty if nothing had.
        learning_rates: Those of the update.
        plain_sgd: Whether an update is the learning rate times the gradient.
        scaler: What the gradient scaler did, where that is the reason.
        doubts: Why a replay may differ from the step, one sentence each.
    """

    grown: str = ""
    learning_rates: Sequence[float] = ()
    plain_sgd: bool = False
    scaler: str = ""
    doubts: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Which operation made the first bad value, and why. Plain values: it travels between ranks.

    Attributes:
        cause: The class of cause.
        what: The operation, its place and what went in, as a sentence.
        because: What speaks for the class, as a sentence.
        confirmed: What was tried to confirm it and how that went; empty where nothing could be tried.
        advice: The next step, as a sentence.
        operation: The operation, as ``"aten.log"``; of a backward pass, the forward operation it belongs to.
        backward: Whether it was in its backward pass.
        module: The name of the module whose operation it is; empty for training_step itself.
        file: The user's file; None if unknown.
        line: The line in it.
        samples: The samples of the batch that are affected, where that is known.
        batch_idx: The batch.
    """

    cause: Cause
    what: str
    because: str
    confirmed: str
    advice: str
    operation: str = ""
    backward: bool = False
    module: str = ""
    file: str | None = None
    line: int | None = None
    samples: tuple[int, ...] = ()
    batch_idx: int | None = None


def explain(rerun: Rerun, plain: Outcome, background: Background) -> Explanation:
    """Say which operation made the first bad value of a step, and why.

    Args:
        rerun: The step, entered.
        plain: What it gave when it was run again.
        background: What is known of it already.

    Raises:
        CannotRerunError: The step cannot be run again, or what is bad cannot be traced; the message says why.
    """
    if plain.is_finite:
        return _not_reproducible(rerun, background)
    trace = Trace(rerun.module)
    traced = rerun.run(within=trace.watching())
    leaves = _Leaves(rerun, trace.memory)
    root = find_root(trace.events, _bad_memory(traced, trace.memory), leaves)
    if root is None:
        raise CannotRerunError(
            "its NaN or Inf could not be followed to an operation (compiled or custom kernels may hide them)"
        )
    return _Classifier(rerun, background, trace, root, _position_of_bad(traced, rerun), plain).explanation()


def _bad_memory(outcome: Outcome, memory: Memory) -> list[int]:
    """Of the first bad loss; of all bad gradients where every loss is good."""
    bad_losses = [loss for loss in outcome.losses if not math.isfinite(float(loss))]
    names = {bad.name for bad in find_bad(outcome.gradients.items())}
    bad: Sequence[Tensor] = bad_losses[:1] or [g for name, g in outcome.gradients.items() if name in names]
    return [key for tensor in bad if (key := memory.key(tensor)) is not None]


def _position_of_bad(outcome: Outcome, rerun: Rerun) -> int:
    """The position of the first micro-batch with a bad loss; the last where every loss is good."""
    last = len(rerun.micro) - 1
    if len(outcome.losses) != len(rerun.micro):
        return last
    return next((i for i, loss in enumerate(outcome.losses) if not math.isfinite(float(loss))), last)


class _Leaves:
    """Knows what lies in memory that no operation wrote."""

    def __init__(self, rerun: Rerun, memory: Memory) -> None:
        self._known: dict[int | None, Leaf] = {}
        for name, buffer in rerun.module.named_buffers():
            self._known[memory.key(buffer)] = Leaf(Origin.BUFFER, plain_name(name), may_be_infinite=True)
        for name, parameter in rerun.module.named_parameters():
            leaf = Leaf(Origin.PARAMETER, plain_name(name), may_be_infinite=not parameter.requires_grad)
            self._known[memory.key(parameter)] = leaf
        for micro in rerun.micro:
            masks = {bad.name for bad in bad_inputs(micro) if bad.is_mask}
            for name, tensor in named_tensors(micro.batch, "batch"):
                self._known[memory.key(tensor)] = Leaf(Origin.BATCH, name, may_be_infinite=name in masks)

    def __call__(self, key: int) -> Leaf:
        return self._known.get(key, UNKNOWN)


class _Classifier:
    """Tries what would make the step finite, and names the class by what did."""

    def __init__(  # noqa: PLR0917, all that was found
        self, rerun: Rerun, background: Background, trace: Trace, root: Root, position: int, plain: Outcome
    ) -> None:
        self._rerun = rerun
        self._background = background
        self._trace = trace
        self._root = root
        self._position = position
        self._micro = rerun.micro[position]
        self._sum = _sums(plain)
        self._tried: list[str] = []
        self._samples = self._find_samples()

    def explanation(self) -> Explanation:
        cause, because, advice = self._classify()
        event, place = self._root.event, self._root.event.place
        return Explanation(
            cause=cause,
            what=describe_root(self._root, type(self._rerun.module).__name__, self._samples, self._micro.index),
            because=because,
            confirmed="; ".join(self._tried),
            advice=advice,
            operation=event.of_forward or event.operation,
            backward=event.backward,
            module=event.module,
            file=None if place is None else place.file,
            line=None if place is None else place.line,
            samples=self._samples,
            batch_idx=self._micro.index,
        )

    def _classify(self) -> tuple[Cause, str, str]:
        leaf, grown = self._root.leaf, self._background.grown
        if leaf is not None and leaf.origin is Origin.BATCH:
            return self._dirty()
        if leaf is not None and leaf.origin in {Origin.PARAMETER, Origin.BUFFER} and not grown:
            return self._bad_state(leaf)
        if grown and (leaf is not None or self._is_overflow()):
            return self._exploding(grown)
        if self._trace.uses_narrow_floats and leaf is None and self._is_finite_when("float32", torch.float32):
            reason = f"{self._background.scaler}; " if self._background.scaler else ""
            return (
                Cause.LOW_PRECISION,
                f"{reason}the step is finite in float32, so a value left a 16-bit type's range (float16 ends at 65504)",
                'train with precision="bf16-mixed" or "32-true", or keep this operation in float32.',
            )
        if leaf is None and self._is_overflow():
            self._is_finite_when("float64", torch.float64)
            event = self._root.event
            return (
                Cause.OVERFLOW,
                "the operation is defined for what it took, but its result is too large for the type",
                advice_for(event.operation, event.of_forward),
            )
        return self._domain()

    def _dirty(self) -> tuple[Cause, str, str]:
        batch, how = cleaned(self._micro.batch)
        self._try(how, batches={self._position: batch})
        return (
            Cause.DIRTY_DATA,
            "; ".join(str(bad) for bad in bad_inputs(self._micro) if not bad.is_mask),
            "look at those samples in the data set and repair or drop them.",
        )

    def _bad_state(self, leaf: Leaf) -> tuple[Cause, str, str]:
        tensors = {**dict(self._rerun.module.named_parameters()), **dict(self._rerun.module.named_buffers())}
        tensor = next(each for name, each in tensors.items() if plain_name(name) == leaf.name)
        self._rerun.reset()
        kept = tensor.data
        (bad,) = find_bad([(leaf.name, tensor)])
        try:
            tensor.data = torch.nan_to_num(kept, 0.0, 0.0, 0.0)
            self._try(f"with 0 in the place of NaN and Inf in {leaf.name}", restore=False)
        finally:
            tensor.data = kept
        return (
            Cause.BAD_PARAMETER,
            f"{bad} held NaN or Inf before this step",
            "check the checkpoint or code that wrote these weights; start again from a finite one.",
        )

    def _exploding(self, grown: str) -> tuple[Cause, str, str]:
        rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(self._background.learning_rates)) or "not known"
        if not self._is_finite_when("float64", torch.float64):
            self._try_smaller_weights()
        elif self._background.plain_sgd and self._background.learning_rates:
            tried = try_rates(self._rerun, max(self._background.learning_rates))
            if tried:
                self._tried.append(tried)
        summed = ", and make the loss a mean: it is a sum over the batch" if self._sum else ""
        return (
            Cause.EXPLODING,
            f"{grown}, until the value was too large for its type",
            f"lower the learning rate (now {rates}) or clip gradients (Trainer(gradient_clip_val=1.0)){summed}.",
        )

    def _try_smaller_weights(self) -> None:
        """Where not even float64 holds what the weights have grown to."""
        kept = [(p, p.data) for p in self._rerun.module.parameters() if p.is_floating_point()]
        for power in range(1, _SMALLEST_WEIGHTS + 1):
            self._rerun.reset()
            try:
                for parameter, data in kept:
                    parameter.data = data / 10**power
                finite = self._rerun.run(restore=False).is_finite
            except CannotRerunError:
                return
            finally:
                for parameter, data in kept:
                    parameter.data = data
            if finite:
                self._tried.append(f"with all weights divided by {10**power} the step is finite")
                return

    def _domain(self) -> tuple[Cause, str, str]:
        event = self._root.event
        changed = with_other_samples(self._micro.batch, self._samples)
        if changed is not None:
            listed = list_samples(self._samples)
            self._try(f"with sample {changed[1]} in the place of {listed}", batches={self._position: changed[0]})
        if event.constant:
            because = "the code itself writes it there"
        else:
            because = "the operation is undefined or infinite for what it took"
        return Cause.DOMAIN, because, advice_for(event.operation, event.of_forward)

    def _find_samples(self) -> tuple[int, ...]:
        """Which samples are affected, where dimension 0 of what the operation gave or took is the batch's."""
        n_samples = n_samples_of(self._micro.batch)
        event = self._root.event
        for values in (*event.gave, *event.took):
            if values.shape[:1] == (n_samples,) and values.samples:
                return values.samples
        leaf = self._root.leaf
        if leaf is not None and leaf.origin is Origin.BATCH:
            return next((bad.samples for bad in bad_inputs(self._micro) if bad.name == leaf.name), ())
        return ()

    def _is_overflow(self) -> bool:
        return self._root.event.finite_when_wide is True

    def _is_finite_when(self, name: str, dtype: torch.dtype) -> bool:
        batches = {i: widened_batch(micro.batch, dtype) for i, micro in enumerate(self._rerun.micro)}
        return self._try(f"in {name}", within=wide(self._rerun.module, dtype), batches=batches)

    def _try(
        self,
        how: str,
        *,
        within: AbstractContextManager[Any] | None = None,
        batches: dict[int, Any] | None = None,
        restore: bool = True,
    ) -> bool:
        try:
            finite = self._rerun.run(within=within, batches=batches, restore=restore).is_finite
        except CannotRerunError as error:
            if error.__cause__ is not None and is_out_of_memory(error.__cause__):
                self._tried.append(f"{how} it could not be run: out of memory")
            return False
        self._tried.append(f"{how} the step is {'finite' if finite else 'bad too'}")
        return finite


def _not_reproducible(rerun: Rerun, background: Background) -> Explanation:
    if background.doubts:
        raise CannotRerunError(
            f"run again it was finite, but it could not be run exactly: {' '.join(background.doubts)}"
        )
    again = rerun.run().is_finite
    if not again:
        raise CannotRerunError("run again it was finite once and bad once: the step itself is not deterministic")
    return Explanation(
        cause=Cause.NOT_REPRODUCIBLE,
        what="No operation gives NaN or Inf when the step is run again.",
        because="the same weights, batch and random numbers gave a finite loss and finite gradients, twice",
        confirmed="",
        advice="suspect the hardware (memory, overclocking, a failing GPU: run its diagnostics) or kernels that are "
        "not deterministic; go on from the last good checkpoint, on another device if it happens again.",
    )


def _sums(outcome: Outcome) -> bool:
    """Whether the loss is a sum."""
    node: Any = None if outcome.graph is None else outcome.graph.grad_fn
    for _ in range(8):
        if node is None:
            return False
        if node.name() == "SumBackward0" or getattr(node, "_saved_reduction", None) == 2:  # noqa: PLR2004, torch's number for "sum"
            return True
        if node.name() not in {"DivBackward0", "MulBackward0", "ToCopyBackward0", "NegBackward0", "ViewBackward0"}:
            return False
        node = node.next_functions[0][0]
    return False
