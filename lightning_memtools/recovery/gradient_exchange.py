"""Lets one rank run its step again while the others wait for its gradients, and then averages the gradients.

In DistributedDataParallel a rank that runs out of memory leaves the others waiting in an all-reduce, where they receive
no message. They need none: they cannot tell a rank that runs its step again from a slow one.

1. The failed backward pass is ended over a process group of this rank alone, so that the reducer is ready again.
   Buckets that had been sent have averages that are right already: a bucket is sent when its gradients are complete.
2. The parts run on the module itself; without its wrapper they send nothing.
3. A backward pass that adds -0 to every gradient lets the reducer send the other buckets, in the order in which the
   ranks that wait have them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memtools._torch import (
    SilentGroup,
    buckets_of,
    expect_gradients,
    forget_gradient_order,
    has_gradient_hook,
    reduces_over,
)
from lightning_memtools.recovery.batch_parts import CannotSplitError
from lightning_memtools.reporting.ranks import refused_collectives


class GradientExchange:
    """Averages gradients over the ranks under DistributedDataParallel, even for a rank that runs its batch in parts.

    Args:
        strategy: The Trainer's strategy. If its `model` is not a DistributedDataParallel, all methods do nothing.
    """

    def __init__(self, strategy: Any = None) -> None:
        model = getattr(strategy, "model", None)
        self._strategy = strategy
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        self._has_failed = False
        self._buckets: list[list[nn.Parameter]] = []
        self._sent: list[tuple[nn.Parameter, Tensor | None]] = []

    def begin(self) -> None:
        """Reset the state for a new step."""
        self._has_failed, self._buckets, self._sent = False, [], []

    @contextmanager
    def run_of_step(self, n_parts: int) -> Iterator[None]:
        """Context manager for one attempt at the step. If `n_parts` > 1, DDP does not average gradients within it."""
        if n_parts == 1 or self._wrapper is None:
            yield
        elif not self._has_failed:  # through the wrapper, because its forward pass copies buffers to the other ranks
            with self._wrapper.no_sync():
                yield
        else:  # on the module without its wrapper, which exchanges nothing
            self._strategy.model = self._strategy.lightning_module
            try:
                yield
            finally:
                self._strategy.model = self._wrapper

    def leave(self, complete: Collection[nn.Parameter], *, keeps: bool = False) -> str:
        """Clean up after a failed backward pass. If DDP averages gradients in it, reset the reducer and all gradients.

        Return "" if the step can be run again, else the reason why it cannot.

        Args:
            complete: The parameters to which the failed pass had already added its gradients.
            keeps: True if these gradients include those of earlier batches, which must not be lost.
        """
        if self._has_failed or self._wrapper is None:
            return ""
        self._has_failed = True
        if not self._wrapper.require_backward_grad_sync:
            return ""
        if keeps and self._wrapper.gradient_as_bucket_view:
            return "gradient_as_bucket_view=True: gradients that earlier batches accumulated are in the buckets already"
        return self._end_backward(complete, self._wrapper)

    def _end_backward(self, complete: Collection[nn.Parameter], wrapper: DistributedDataParallel) -> str:
        self._buckets = buckets_of(wrapper)
        done = set(complete)
        open_ = [parameter for bucket in self._buckets for parameter in bucket if parameter not in done]
        if not open_:
            return "all of its gradients had been sent to the other ranks, or zero_grad(set_to_none=False) is used"
        if not done:  # else they are expected already
            expect_gradients(wrapper)
        self._clear()
        silent = SilentGroup(wrapper.process_group)
        with reduces_over(wrapper, silent):
            _touch(open_)
        n_complete = next(n for n, bucket in enumerate(self._buckets) if not done.issuperset(bucket))
        n_sent = n_complete if _is_pretended(wrapper) else len(self._buckets) - silent.n_all_reduces
        # Gradients may be views of the buckets, which are written again.
        is_view = wrapper.gradient_as_bucket_view
        averages = [(p, p.grad) for bucket in self._buckets[:n_sent] for p in bucket]
        self._sent = [(p, grad.clone() if is_view and grad is not None else grad) for p, grad in averages]
        self._clear()
        forget_gradient_order(wrapper)
        if n_sent != n_complete:
            return "memory ran out while a bucket of gradients was sent, so that the other ranks may have it or not"
        return ""

    def rejoin(self) -> None:
        """After a batch has run in parts, average its gradients over the ranks, if an optimizer step follows."""
        if self._wrapper is None:
            return
        is_sent = self._wrapper.require_backward_grad_sync
        # As after a forward pass of the wrapper: before the next one it copies buffers to the other ranks, or does not.
        self._wrapper.require_forward_param_sync = is_sent
        if not is_sent:
            return
        buckets = self._buckets or buckets_of(self._wrapper)
        expect_gradients(self._wrapper)
        sent = {parameter for parameter, _ in self._sent}
        if sent:
            with reduces_over(self._wrapper, SilentGroup(self._wrapper.process_group)):
                _touch([parameter for bucket in buckets for parameter in bucket if parameter in sent])
        _touch([parameter for bucket in buckets for parameter in bucket if parameter not in sent])
        for parameter, average in self._sent:
            parameter.grad = average
        self._sent = []

    def _clear(self) -> None:
        for bucket in self._buckets:
            for parameter in bucket:
                parameter.grad = None


def why_unsent(strategy: Any) -> str:
    """Return the reason why, under this strategy, a single rank cannot rerun its step; "" if it can."""
    wrapper = strategy.model
    if not isinstance(wrapper, DistributedDataParallel):
        return ""
    if wrapper.find_unused_parameters or wrapper.static_graph:
        option = "find_unused_parameters" if wrapper.find_unused_parameters else "static_graph"
        return f"{option}=True: after each backward pass the ranks then tell each other which parameters it used"
    if has_gradient_hook(wrapper) and not _is_pretended(wrapper):
        return "a communication hook is registered, and what it sends or keeps is not known"
    norm = next((name for name, part in wrapper.module.named_modules() if isinstance(part, nn.SyncBatchNorm)), None)
    if norm is not None:
        return f"{norm} is a SyncBatchNorm: the ranks talk in the forward pass, where one alone cannot run again"
    return ""


def no_collectives() -> AbstractContextManager[None]:
    """Return a context manager in which, with several ranks, any collective raises an error that names it."""
    return refused_collectives(
        lambda name: CannotSplitError(
            f"it calls the collective {name!r}, in which the other ranks would not take part as often, as "
            "self.log(..., sync_dist=True) of a value of each step does; leave it out, or log with on_step=False"
        )
    )


def _is_pretended(wrapper: DistributedDataParallel) -> bool:
    """Return True if the other ranks are only simulated, as in a dry run."""
    return bool(distributed.get_backend(wrapper.process_group) == "fake")


def _touch(parameters: list[nn.Parameter]) -> None:
    """Run a backward pass that adds -0.0 to all gradients. No value changes, but the hooks of DDP's reducer run."""
    zeros = [torch.full((), -0.0, dtype=p.dtype, device=p.device).expand_as(p) for p in parameters]
    torch.autograd.backward(parameters, zeros)
