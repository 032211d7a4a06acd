"""Explains a bad step: runs it again, traces its bad values to their root, and tests the cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_memtools._torch import is_in_memory, saved_reduction
from lightning_memtools.memory.nested_tensors import plain_name, tensors_in_attributes
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.nonfinite.bad_step import StepOutcome, bad_inputs, list_samples
from lightning_memtools.nonfinite.bad_value_roots import (
    BadValueRoot,
    PriorTensor,
    PriorTensors,
    ValueOrigin,
    describe_root,
    find_bad_value_root,
)
from lightning_memtools.nonfinite.diagnosis import (
    ADVICE,
    Explanation,
    KnownOfStep,
    NonFiniteCause,
    advice_for,
    advice_on_overflow,
    public_name,
    rates_as_text,
)
from lightning_memtools.nonfinite.finite_checks import find_bad
from lightning_memtools.nonfinite.interventions import (
    cleaned,
    n_samples_of,
    nonfinite_zeroed,
    try_rates,
    wide,
    widened_batch,
    with_other_samples,
)
from lightning_memtools.nonfinite.operation_trace import OperationTrace, StorageKeys
from lightning_memtools.nonfinite.step_rerun import CannotRerunError, StepRerun


def explain(rerun: StepRerun, plain: StepOutcome, background: KnownOfStep) -> Explanation:
    """Return the operation that made the first bad value of a step, and its cause.

    Raises:
        CannotRerunError: The step cannot be run again, or what is bad cannot be traced; the message says why.
    """
    if plain.is_finite:
        return _not_reproducible(rerun, background)
    trace, traced, root = _traced(rerun)
    tried = list[str]()
    if root is not None and root.leaf is not None and root.leaf.origin is ValueOrigin.ATTRIBUTE:
        # The tensor is as the step left it, not as the step found it: it may be the cause or a result of the bad step.
        rerun.prepare = lambda: _fill_attributes(rerun.module)
        is_finite = rerun.run().is_finite
        tried.append(
            f"with 0 in the place of NaN in {root.leaf.name} the step is {'finite' if is_finite else 'bad too'}"
        )
        if not is_finite:
            trace, traced, root = _traced(rerun)
    if root is None:
        raise CannotRerunError(
            "its NaN or Inf could not be followed to an operation (compiled or custom kernels may hide them)"
        )
    position = _position_of_bad(traced, rerun)
    return _Classifier(rerun, background, trace, root, position, plain, tried).explanation()


def _traced(rerun: StepRerun) -> tuple[OperationTrace, StepOutcome, BadValueRoot | None]:
    trace = OperationTrace(rerun.module)
    rerun.reset()
    leaves = PriorTensors(rerun, trace.memory)  # before the step can replace these tensors
    traced = rerun.run(within=trace.watching())
    return trace, traced, find_bad_value_root(trace.events, _bad_memory(traced, trace.memory), leaves)


@torch.no_grad()
def _fill_attributes(module: Module) -> None:
    for _, tensor in tensors_in_attributes(module):
        if tensor.is_floating_point() and is_in_memory(tensor):
            tensor.detach().nan_to_num_(0.0, torch.inf, -torch.inf)


def _bad_memory(outcome: StepOutcome, memory: StorageKeys) -> list[int]:
    """Return the keys of the first bad loss; of all bad gradients where every loss is good."""
    bad_losses = [loss for loss in outcome.losses if not math.isfinite(float(loss))]
    names = {bad.name for bad in find_bad(outcome.gradients.items())}
    bad: Sequence[Tensor] = bad_losses[:1] or [g for name, g in outcome.gradients.items() if name in names]
    return [key for tensor in bad if (key := memory.key(tensor)) is not None]


def _position_of_bad(outcome: StepOutcome, rerun: StepRerun) -> int:
    """Return the position of the first micro-batch with a bad loss; the last where every loss is good."""
    last = len(rerun.micro) - 1
    if len(outcome.losses) != len(rerun.micro):
        return last
    return next((i for i, loss in enumerate(outcome.losses) if not math.isfinite(float(loss))), last)


def _not_reproducible(rerun: StepRerun, background: KnownOfStep) -> Explanation:
    if background.doubts:
        raise CannotRerunError(
            f"run again it was finite, but it could not be run exactly: {' '.join(background.doubts)}"
        )
    if not rerun.run().is_finite:
        raise CannotRerunError("run again it was finite once and bad once: the step itself is not deterministic")
    return Explanation(
        cause=NonFiniteCause.NOT_REPRODUCIBLE,
        what="No operation gives NaN or Inf when the step is run again.",
        because="the same weights, batch and random numbers gave a finite loss and finite gradients, twice",
        confirmed="",
        advice=ADVICE["not reproducible"],
    )


_SMALLEST_WEIGHTS = 6  # powers of ten


@dataclass
class _Classifier:
    """Tests which changes make the step finite, and derives the class of cause from the results."""

    rerun: StepRerun
    background: KnownOfStep
    trace: OperationTrace
    root: BadValueRoot
    position: int  # of the micro-batch with the bad loss
    plain: StepOutcome
    tried: list[str]  # the tests that were made, with their results

    def __post_init__(self) -> None:
        self._rates = rates_as_text(self.background.learning_rates)
        self._micro = self.rerun.micro[self.position]
        self._sum = _sums(self.plain)
        self._samples = self._find_samples()

    def explanation(self) -> Explanation:
        """Classify, and put everything together."""
        cause, because, advice = self._classify()
        event, place = self.root.event, self.root.event.place
        return Explanation(
            cause=cause,
            what=describe_root(self.root, type(self.rerun.module).__name__, self._samples, self._micro.index),
            because=because,
            confirmed="; ".join(self.tried),
            advice=advice,
            operation=event.of_forward or event.operation,
            backward=event.backward,
            module=event.module,
            file=None if place is None else place.file,
            line=None if place is None else place.line,
            samples=self._samples,
            batch_idx=self._micro.index,
        )

    def _classify(self) -> tuple[NonFiniteCause, str, str]:
        leaf, grown = self.root.leaf, self.background.grown
        if leaf is not None and leaf.origin is ValueOrigin.BATCH:
            return self._dirty()
        if leaf is not None and not grown:
            is_restored = leaf.origin in {ValueOrigin.PARAMETER, ValueOrigin.BUFFER}
            return self._bad_state(leaf) if is_restored else self._bad_elsewhere(leaf)
        if grown and (leaf is not None or self._is_overflow()):
            return self._exploding(grown)
        if self.trace.uses_narrow_floats and leaf is None and self._is_finite_when("float32", torch.float32):
            return self._low_precision()
        if leaf is None and self._is_overflow():
            return self._overflow()
        return self._domain()

    def _low_precision(self) -> tuple[NonFiniteCause, str, str]:
        because = f"{self.background.scaler}; " if self.background.scaler else ""
        because += "the step is finite in float32, "
        if self._is_overflow():
            because += "so a value left a 16-bit type's range (float16 ends at 65504)"
            advice = ADVICE["low precision"]
        else:
            because += "so rounding to a 16-bit type gave this operation an input outside of its domain"
            advice = ADVICE["rounding"]
        return NonFiniteCause.LOW_PRECISION, because, advice

    def _overflow(self) -> tuple[NonFiniteCause, str, str]:
        self._is_finite_when("float64", torch.float64)
        event = self.root.event
        advice = advice_on_overflow(event.operation, event.of_forward)
        if self._samples and len(self._samples) == n_samples_of(self._micro.batch):
            advice += " " + ADVICE["overflow in all samples"].format(rates=self._rates)
        because = "the operation is defined at its inputs, but its result is too large for the type"
        return NonFiniteCause.OVERFLOW, because, advice

    def _dirty(self) -> tuple[NonFiniteCause, str, str]:
        batch, how = cleaned(self._micro.batch)
        self._try(how, batches={self.position: batch})
        return (
            NonFiniteCause.DIRTY_DATA,
            "; ".join(str(bad) for bad in bad_inputs(self._micro) if not bad.is_mask),
            ADVICE["dirty data"],
        )

    def _bad_state(self, leaf: PriorTensor) -> tuple[NonFiniteCause, str, str]:
        tensors = {**dict(self.rerun.module.named_parameters()), **dict(self.rerun.module.named_buffers())}
        tensor = next(each for name, each in tensors.items() if plain_name(name) == leaf.name)
        self.rerun.reset()
        kept = tensor.data
        (bad,) = find_bad([(leaf.name, tensor)])
        try:
            tensor.data = torch.nan_to_num(kept, 0.0, 0.0, 0.0)
            self._try(f"with 0 in the place of NaN and Inf in {leaf.name}", restore=False)
        finally:
            tensor.data = kept
        return (
            NonFiniteCause.BAD_PARAMETER,
            f"{bad} held NaN or Inf before this step",
            ADVICE["bad weights"],
        )

    def _bad_elsewhere(self, leaf: PriorTensor) -> tuple[NonFiniteCause, str, str]:
        """Classify bad values in a tensor that is not restored to its values before the step."""
        if leaf.origin is ValueOrigin.ELSEWHERE:
            because = (
                "a tensor that belongs neither to the module nor to the batch held NaN or Inf: a global, or one made "
                "from numbers in the code"
            )
            return NonFiniteCause.BAD_PARAMETER, because, ADVICE["bad tensor from elsewhere"]
        because = f"attribute {leaf.name}, a tensor that is no buffer, held NaN: this step or an earlier one wrote it"
        advice = ADVICE["bad attribute"].format(name=leaf.name)
        return NonFiniteCause.BAD_PARAMETER, because, advice

    def _exploding(self, grown: str) -> tuple[NonFiniteCause, str, str]:
        if not self._is_finite_when("float64", torch.float64):
            self._try_smaller_weights()
        elif self.background.plain_sgd and self.background.learning_rates:
            tried = try_rates(self.rerun, max(self.background.learning_rates))
            if tried:
                self.tried.append(tried)
        advice = ADVICE["exploding sum" if self._sum else "exploding"].format(rates=self._rates)
        return NonFiniteCause.EXPLODING, f"{grown}, until the value was too large for its type", advice

    def _try_smaller_weights(self) -> None:
        """Run the step with smaller weights, where not even float64 can hold its values."""
        kept = [(p, p.data) for p in self.rerun.module.parameters() if p.is_floating_point()]
        for power in range(1, _SMALLEST_WEIGHTS + 1):
            self.rerun.reset()
            try:
                for parameter, data in kept:
                    parameter.data = data / 10**power
                finite = self.rerun.run(restore=False).is_finite
            except CannotRerunError:
                return
            finally:
                for parameter, data in kept:
                    parameter.data = data
            if finite:
                self.tried.append(f"with all weights divided by {10**power} the step is finite")
                return

    def _domain(self) -> tuple[NonFiniteCause, str, str]:
        event, helped = self.root.event, False
        changed = with_other_samples(self._micro.batch, self._samples)
        if changed is not None:
            listed = list_samples(self._samples)
            how = f"with sample {changed[1]} in the place of {listed}"
            helped = self._try(how, batches={self.position: changed[0]})
        if not helped:
            made = f"{public_name(event.operation)} {'made' if event.backward else 'makes, forward and backward,'}"
            self._try(f"with 0 in the place of the NaN and Inf that {made}", within=nonfinite_zeroed(event.number))
        if event.constant:
            return NonFiniteCause.DOMAIN, "the code itself writes it there", ADVICE["constant"]
        because = "the operation is undefined or infinite at its inputs"
        return NonFiniteCause.DOMAIN, because, advice_for(event.operation, event.of_forward)

    def _find_samples(self) -> tuple[int, ...]:
        """Return the affected samples, where dimension 0 of the operation's outputs or inputs is that of the batch."""
        n_samples = n_samples_of(self._micro.batch)
        event = self.root.event
        for values in (*event.gave, *event.took):
            if values.shape[:1] == (n_samples,) and values.samples:
                return values.samples if self._are_samples(values.samples) else ()
        leaf = self.root.leaf
        if leaf is not None and leaf.origin is ValueOrigin.BATCH:
            return next((bad.samples for bad in bad_inputs(self._micro) if bad.name == leaf.name), ())
        return ()

    def _are_samples(self, positions: Sequence[int]) -> bool:
        """Return whether positions in a tensor as long as the batch are samples: it may be as long as a layer is wide.

        Where a weight or buffer is of that length too, the step must be finite without those samples.
        """
        tensors = [*self.rerun.module.parameters(), *self.rerun.module.buffers()]
        if all(n_samples_of(self._micro.batch) not in tensor.shape for tensor in tensors if not is_lazy(tensor)):
            return True
        changed = with_other_samples(self._micro.batch, positions)
        try:
            return changed is not None and self.rerun.run(batches={self.position: changed[0]}).is_finite
        except CannotRerunError:
            return False

    def _is_overflow(self) -> bool:
        return self.root.event.finite_when_wide is True

    def _is_finite_when(self, name: str, dtype: torch.dtype) -> bool:
        batches = {i: widened_batch(micro.batch, dtype) for i, micro in enumerate(self.rerun.micro)}
        return self._try(f"in {name}", within=wide(self.rerun.module, dtype), batches=batches)

    def _try(
        self,
        how: str,
        *,
        within: AbstractContextManager[Any] | None = None,
        batches: dict[int, Any] | None = None,
        restore: bool = True,
    ) -> bool:
        try:
            finite = self.rerun.run(within=within, batches=batches, restore=restore).is_finite
        except CannotRerunError as error:
            if error.__cause__ is not None and is_out_of_memory(error.__cause__):
                self.tried.append(f"{how} the step ran out of memory")
            return False
        self.tried.append(f"{how} the step is {'finite' if finite else 'bad too'}")
        return finite


def _sums(outcome: StepOutcome) -> bool:
    """Return whether the loss is a sum."""
    node: Any = None if outcome.graph is None else outcome.graph.grad_fn
    for _ in range(8):
        if node is None:
            return False
        if node.name() == "SumBackward0" or saved_reduction(node) == 2:  # noqa: PLR2004, torch's number for "sum"
            return True
        if node.name() not in {"DivBackward0", "MulBackward0", "ToCopyBackward0", "NegBackward0", "ViewBackward0"}:
            return False
        node = node.next_functions[0][0]
    return False
