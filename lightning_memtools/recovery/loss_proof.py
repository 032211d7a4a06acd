"""Proves on a few samples that a loss is a mean or a sum over its batch, so that the batch can be split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lightning_memtools._torch import AnyDropout, StatisticsNorm
from lightning_memtools.null_cuda.launch import is_on_null_device
from lightning_memtools.recovery.batch_parts import CannotSplitError, samples_that_differ
from lightning_memtools.recovery.gradient_exchange import no_collectives
from lightning_memtools.recovery.step_start import BatchStep, has_node
from lightning_memtools.state.random_state import RandomState
from lightning_memtools.state.starts import RestorableBatch

LossKind = Literal["mean", "sum"]

# Differences that pass for rounding, relative to the gradients. On a CPU, networks of images and of texts showed up to
# 2e-7, and 1.5e-3 in bfloat16; on a GPU, other sizes may run in other kernels.
_TOLERANCE = 2e-3
_COARSE_TOLERANCE = 2e-2
# A power of two, which changes no digit: gradients that autocast keeps in float16 do not underflow.
_SCALE = 2.0**10


class LossProof:
    """Compares gradients: those of a few samples together with those of the same samples in two groups.

    The groups hold the samples with the least and the most padding, so that a mean over tokens shows. Losses alone do
    not tell: at the beginning of training they are nearly equal for all samples.

    Args:
        split: The user's function `(batch, n_parts) -> parts`.
        weight: The user's function that returns over how much of a batch its loss is a mean; None for its samples.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        split: Callable[[Any, int], Any] | None = None,
        weight: Callable[[Any], Any] | None = None,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._split = split
        self._weight = weight
        self.is_weighted = weight is not None
        self._is_all_quiet = False

    def known_weights_of(self, parts: Sequence[tuple[Any, int]]) -> list[float]:
        """Return `weights_of` the parts, or their numbers of samples where the user's function fails."""
        try:
            return self.weights_of(parts)
        except CannotSplitError:
            return [float(count) for _, count in parts]

    def weights_of(self, parts: Sequence[tuple[Any, int]]) -> list[float]:
        """Return the weights of the parts' losses, given the parts and their numbers of samples.

        Raises:
            CannotSplitError: The user's function raises or returns no weights.
        """
        if self._weight is None:
            return [float(count) for _, count in parts]
        try:
            weights = [float(self._weight(part)) for part, _ in parts]
        except Exception as error:
            raise CannotSplitError(f"loss_weight raised {type(error).__name__}: {error}") from error
        if not all(0 <= weight < float("inf") for weight in weights) or not sum(weights):
            raise CannotSplitError(f"loss_weight gave {weights} for parts of {[count for _, count in parts]} samples")
        return weights

    def kind(self, step: BatchStep, most: int) -> LossKind:
        """Return whether the loss is a mean or a sum, by its gradients, which are overwritten.

        The host waits for the losses and the norms of the gradients. At most `most` samples run at once, if the batch
        can be cut as finely.

        Raises:
            CannotSplitError: It is neither; the message quotes the numbers.
        """
        few, many, both = samples_that_differ(step.batch, most, self._split)
        weights = self.weights_of([few, many])
        # Dropout that is no module is switched off with the modules around it, which may change what the step does.
        for is_all in (True,) if self._is_all_quiet else (False, True):
            with without_randomness(self._model, is_all=is_all), no_collectives():
                before = RandomState.now(device=self._parameters[0].device)
                kind, reason = self._compare(step, (few, many, both), weights)
                draws = RandomState.now(device=self._parameters[0].device) != before
            if reason and draws and is_all:
                reason = (
                    "training_step draws random numbers, and not for dropout alone, so that nothing can be compared; "
                    'loss="mean" or loss="sum" says what the loss is'
                )
            if not reason:
                self._is_all_quiet = is_all
                return kind
            # Only what is random is asked again without it: other losses may be left out then, too.
            if not draws:
                break
        raise CannotSplitError(reason)

    def _compare(
        self, step: BatchStep, samples: Sequence[tuple[Any, int]], weights: Sequence[float]
    ) -> tuple[LossKind, str]:
        (few, n_few), (many, n_many), (both, _) = samples
        # With a graph: a step may take gradients itself, as of an energy.
        one, other, whole = (float(_loss_of(step, part).detach()) for part in (few, many, both))
        shares = [weight / sum(weights) for weight in weights]
        # A group of no weight has no mean.
        mean = sum(share * loss for share, loss in zip(shares, (one, other), strict=True) if share)
        kind: LossKind = "sum" if abs(whole - one - other) < abs(whole - mean) else "mean"
        factors = shares if kind == "mean" else (1.0, 1.0)
        for parameter in self._parameters:
            parameter.grad = None
        norms, tolerance = [], _TOLERANCE
        for part, factor in ((both, 1.0), (few, -factors[0]), (many, -factors[1])):
            if factor:
                loss = _loss_of(step, part)
                if part is both and self._is_coarse(loss):
                    tolerance = _COARSE_TOLERANCE
                (loss * (factor * _SCALE)).backward()  # type: ignore[no-untyped-call]
            norms.append(self._gradient_norm())
        scale = norms[0] + norms[1]
        if not scale and not is_on_null_device():  # a dry run computes zeros
            return kind, "the gradients of its samples are 0, so that nothing can be compared"
        if norms[2] <= tolerance * scale:
            return kind, ""
        return kind, (
            f"the losses of {n_few} and {n_many} samples are {one:.6g} and {other:.6g}, and that of both together is "
            f"{whole:.6g}; its gradient differs from the {kind} of theirs by {norms[2] / scale:.1%}, and rounding "
            f"explains {tolerance:.1%}. A loss over pairs of samples cannot be split. A mean over tokens, or over "
            "anything else than samples, can: give loss_weight=, a function that counts them in a batch. "
            'With loss="mean" or loss="sum" nothing is compared'
        )

    def _gradient_norm(self) -> float:
        gradients = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in self._parameters if p.grad is not None
        ]
        return float(get_total_norm(gradients)) if gradients else 0.0

    def _is_coarse(self, loss: Tensor) -> bool:
        """Return whether something is computed in 16 bits: parameters, or copies that autocast makes."""
        is_half = any(p.dtype.itemsize < 4 for p in self._parameters if p.requires_grad)  # noqa: PLR2004, bytes of float32
        return is_half or has_node(loss, "ToCopyBackward0")


def _loss_of(step: BatchStep, part: Any) -> Tensor:
    before = RestorableBatch(part)  # it runs again
    loss: Tensor | None = step.forward(part).closure_loss
    if reason := before.restore():
        raise CannotSplitError(reason)
    if loss is None:
        raise CannotSplitError("training_step returned no loss for some of its samples")
    return loss


@contextmanager
def without_randomness(model: nn.Module, *, is_all: bool) -> Iterator[None]:
    """Switch off dropout and batch statistics inside; with `is_all`, put all modules in evaluation mode."""
    # Recurrent layers stay in training: cuDNN has no backward pass of theirs in evaluation.
    recurrent = [(module, module.dropout) for module in model.modules() if isinstance(module, nn.RNNBase)]
    kept = {module for module, _ in recurrent}
    quiet = (AnyDropout, StatisticsNorm)
    changed = [m for m in model.modules() if m.training and m not in kept and (is_all or isinstance(m, quiet))]
    for module in changed:
        module.training = False
    for module, _ in recurrent:
        module.dropout = 0.0
    try:
        yield
    finally:
        for module in changed:
            module.training = True
        for module, dropout in recurrent:
            module.dropout = dropout
