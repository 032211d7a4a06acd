"""From the operation to the class of cause: tries what would make the step finite."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.nonfinite.cause.bad_value_roots import Leaf, Origin, Root, describe_root
from lightning_memtools.nonfinite.cause.interventions import (
    cleaned,
    mended,
    n_samples_of,
    try_rates,
    wide,
    widened_batch,
    with_other_samples,
)
from lightning_memtools.nonfinite.cause.operation_trace import Trace
from lightning_memtools.nonfinite.causes import Background, Cause, Explanation, advice_for, advice_on_overflow
from lightning_memtools.nonfinite.finite_checks import find_bad
from lightning_memtools.nonfinite.micro_batches import bad_inputs, list_samples
from lightning_memtools.nonfinite.step_outcome import Outcome
from lightning_memtools.nonfinite.step_rerun import CannotRerunError, Rerun
from lightning_memtools.nonfinite.tensor_names import plain_name

_SMALLEST_WEIGHTS = 6  # powers of ten


class Classifier:
    """Tries what would make the step finite, and names the class by what did.

    Args:
        rerun: The step, entered.
        background: What is known of it already.
        trace: Its operations.
        root: Where its bad values come from.
        position: The position of the micro-batch with the bad loss.
        plain: What the step gave when it was run again.
        tried: What has been tried already.
    """

    def __init__(  # noqa: PLR0917, all that was found
        self,
        rerun: Rerun,
        background: Background,
        trace: Trace,
        root: Root,
        position: int,
        plain: Outcome,
        tried: Sequence[str] = (),
    ) -> None:
        self._rerun = rerun
        self._background = background
        self._trace = trace
        self._root = root
        self._position = position
        self._micro = rerun.micro[position]
        self._sum = _sums(plain)
        self._tried = list(tried)
        self._samples = self._find_samples()

    def explanation(self) -> Explanation:
        """Classify, and put everything together."""
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
        if leaf is not None and not grown:
            is_kept = leaf.origin in {Origin.PARAMETER, Origin.BUFFER}
            return self._bad_state(leaf) if is_kept else self._bad_elsewhere(leaf)
        if grown and (leaf is not None or self._is_overflow()):
            return self._exploding(grown)
        if self._trace.uses_narrow_floats and leaf is None and self._is_finite_when("float32", torch.float32):
            return self._low_precision()
        if leaf is None and self._is_overflow():
            return self._overflow()
        return self._domain()

    def _low_precision(self) -> tuple[Cause, str, str]:
        because = f"{self._background.scaler}; " if self._background.scaler else ""
        because += "the step is finite in float32, "
        if self._is_overflow():
            because += "so a value left a 16-bit type's range (float16 ends at 65504)"
            advice = 'train with precision="bf16-mixed" or "32-true", or keep this operation in float32.'
        else:
            because += "so rounding to a 16-bit type made what this operation is not defined for"
            advice = 'keep this operation and what leads to it in float32, or train with precision="32-true".'
        return Cause.LOW_PRECISION, because, advice

    def _overflow(self) -> tuple[Cause, str, str]:
        self._is_finite_when("float64", torch.float64)
        event = self._root.event
        advice = advice_on_overflow(event.operation, event.of_forward)
        if self._samples and len(self._samples) == n_samples_of(self._micro.batch):
            advice += (
                f" Every sample is affected, so look at the weights and the learning rate (now {self._rates()}) too."
            )
        because = "the operation is defined for what it took, but its result is too large for the type"
        return Cause.OVERFLOW, because, advice

    def _rates(self) -> str:
        return ", ".join(f"{rate:g}" for rate in dict.fromkeys(self._background.learning_rates)) or "not known"

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

    def _bad_elsewhere(self, leaf: Leaf) -> tuple[Cause, str, str]:
        """In a tensor that is not put back to what it was before the step."""
        if leaf.origin is Origin.ELSEWHERE:
            because = (
                "a tensor that belongs neither to the module nor to the batch held NaN or Inf: a global, or one made "
                "of numbers in the code"
            )
            return Cause.BAD_PARAMETER, because, "look at what makes and writes that tensor."
        because = f"attribute {leaf.name}, a tensor that is no buffer, held NaN: this step or an earlier one wrote it"
        advice = (
            f"look at what writes {leaf.name}, and make it a buffer (register_buffer): buffers are put back to before "
            "the step, and kept in capsules."
        )
        return Cause.BAD_PARAMETER, because, advice

    def _exploding(self, grown: str) -> tuple[Cause, str, str]:
        if not self._is_finite_when("float64", torch.float64):
            self._try_smaller_weights()
        elif self._background.plain_sgd and self._background.learning_rates:
            tried = try_rates(self._rerun, max(self._background.learning_rates))
            if tried:
                self._tried.append(tried)
        advice = f"lower the learning rate (now {self._rates()}) or clip gradients (Trainer(gradient_clip_val=1.0))"
        if self._sum:
            advice += ", and make the loss a mean: it is a sum over the batch"
        return Cause.EXPLODING, f"{grown}, until the value was too large for its type", f"{advice}."

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
        event, helped = self._root.event, False
        changed = with_other_samples(self._micro.batch, self._samples)
        if changed is not None:
            listed = list_samples(self._samples)
            how = f"with sample {changed[1]} in the place of {listed}"
            helped = self._try(how, batches={self._position: changed[0]})
        if not helped:
            made = f"{event.operation} {'made' if event.backward else 'makes, forward and backward,'}"
            self._try(f"with 0 in the place of the NaN and Inf that {made}", within=mended(event.number))
        if event.constant:
            return Cause.DOMAIN, "the code itself writes it there", "look at where that number comes from."
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
