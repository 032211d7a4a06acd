"""Holds an optimizer's update back, by a flag on the device or by removing gradients; all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_memtools.memory.arriving_values import ArrivingValues
from lightning_memtools.nonfinite.guarded_step import GuardedStep


class UpdateFlag:
    """Decides on the device whether an optimizer step may change weights. The host reads the decision later.

    `flag` is a 0-dim float32 tensor that is set as `found_inf` on fused optimizers: if it is 1, they change nothing.
    After a bad step it stays 1, so that the host may read it at any later time.
    """

    def __init__(self, device: torch.device) -> None:
        self.flag = torch.zeros((), device=device)
        self._sent: ArrivingValues[GuardedStep] = ArrivingValues()
        self._attached: list[Optimizer] = []

    @torch.no_grad()
    def check(self, optimizer: Optimizer, numbers: Tensor, deciding: slice, step: GuardedStep) -> None:
        """If any of `numbers[deciding]` is NaN or Inf, prevent the update of this step and of all later steps."""
        numbers = numbers.to(self.flag.device, non_blocking=True)
        bad = ~torch.isfinite(numbers[deciding]).all()
        # Exactly 0 or 1: the kernels subtract it from the step count.
        self.flag.copy_(bad | (self.flag != 0))
        optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        if all(optimizer is not other for other in self._attached):
            self._attached.append(optimizer)
        self._sent.send(torch.cat([self.flag.to(numbers.dtype).reshape(1), numbers]), step)

    def undecided(self) -> list[GuardedStep]:
        """Return the steps whose results the host has not read yet, oldest first."""
        return self._sent.notes()

    def read(self, *, wait: bool) -> list[tuple[GuardedStep, bool, list[float]]]:
        """Return the results that have reached the host, oldest step first. With `wait`, wait for all results first.

        Returns:
            (step, whether its update was prevented, the numbers that were checked) for each step.
        """
        return [(step, bool(bad), numbers) for (bad, *numbers), step in self._sent.receive(wait=wait)]

    def close(self) -> None:
        """Remove the flag from all optimizers, so that they make updates again. Idempotent."""
        for optimizer in self._attached:
            if getattr(optimizer, "found_inf", None) is self.flag:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self._attached.clear()
        self._sent.clear()


def honours_found_inf(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's step() does nothing while the device tensor `optimizer.found_inf` is 1.

    This holds for PyTorch's fused kernels, which then leave even step counts unchanged. It may not hold for subclasses
    and for other packages' optimizers. With float64 parameters, the result is False: the norm could overflow.
    """
    return type(optimizer) in {SGD, Adam, AdamW, Adagrad} and all(
        group.get("fused")
        and all(p.device.type in {"cpu", "cuda"} and p.dtype != torch.float64 for p in group["params"])
        for group in optimizer.param_groups
    )


def creates_state(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Return True if the next update would create optimizer state. If it is skipped, fused SGD sets no valid state."""
    if type(optimizer) is SGD and not any(group["momentum"] for group in optimizer.param_groups):
        return False
    return not all(map(optimizer.state.__contains__, parameters))


def hide_gradients(optimizer: Optimizer) -> None:
    """Set all gradients to None, so that the next update skips every parameter and creates no state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def mark_settings(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that restores the optimizer's current settings, such as learning rates."""
    kept = [
        {key: each.clone() if isinstance(each, Tensor) else each for key, each in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

    @torch.no_grad()
    def restore() -> None:
        for group, saved in zip(optimizer.param_groups, kept, strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key].copy_(value)  # schedulers write into a learning rate that is a tensor
                else:
                    group[key] = value

    return restore


@torch.no_grad()
def over_ranks(
    numbers: Tensor | None, losses: Sequence[Tensor], n_before: int, device: torch.device, *, has_failed: bool
) -> Tensor:
    """Append four results over all ranks to `numbers`. Runs one collective; does not wait for the device.

    `numbers` is from `measure`: this rank's losses and, from index `n_before` on, its gradient norms. The four results
    are the norm over the gradients of all ranks (only useful for sharded gradients), the largest mean loss of a rank,
    1 if a number on any rank is NaN or Inf, else 0, and 1 if `has_failed` is True on any rank, else 0.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if numbers is None:
        numbers = torch.zeros(0, device=device, dtype=dtype)
    mean = torch.stack(list(losses)).mean() if losses else numbers.new_zeros(())
    is_bad = ~torch.isfinite(numbers).all()
    squares = torch.linalg.vector_norm(numbers[n_before:], dtype=dtype).square()
    own = [squares, mean, is_bad, torch.full_like(is_bad, has_failed)]
    mine = torch.stack([number.to(device, dtype) for number in own])
    everyone = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, mine)
    squares, *highest = torch.stack(everyone).unbind(1)
    return torch.cat([numbers.to(device, dtype), torch.stack([squares.sum().sqrt(), *(e.max() for e in highest)])])


def poison(loss: Tensor) -> None:
    """Make all gradients of this backward pass NaN if the loss is NaN or Inf; otherwise leave every bit unchanged.

    Under data parallelism, gradients are averaged over the ranks but losses are not. The NaN in the
    gradients tells all ranks of a bad loss, without another collective and without waiting for the device.
    """
    if not loss.requires_grad:
        return
    value = loss.detach()
    factor = torch.where(torch.isfinite(value), 1.0, torch.nan).to(value.dtype)
    loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
