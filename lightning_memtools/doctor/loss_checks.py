"""Checks of the loss: inputs that broadcast, a sum over the batch, and sudden jumps; and the trial that shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._torch import l2_norm_of_each
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.step_trial import gradient_growth, place_of_error, trial_of, why_no_trial
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.arriving_values import ArrivingValues
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.reporting.spike_window import SpikeWindow


class StepTrial:
    """Checks by a trial of the first batch's forward pass on fake tensors: broadcasting and sums."""

    # A sum doubles the gradient exactly; half of that allows for a part of the loss that is a mean.
    MIN_GROWTH = 1.5

    def __init__(self, case: TrainingCase, names: Sequence[str]) -> None:
        self._case = case
        self._names = names

    def batch_start(self, batch: Any, index: int) -> Iterator[Finding]:
        """Make the trial, and report what it showed."""
        if index or self._case.forward is None:
            return
        facts = trial_of(self._case, batch)
        if facts.error is not None:
            yield Finding(
                "trial",
                "info",
                place_of_error(facts.error, self._case.model),
                f"A trial of the training step on fake tensors raised {in_one_line(facts.error)}",
                "The checks that need the trial say less.",
                why_no_trial(self._case, batch, facts.error),
            )
        if "loss_broadcast" in self._names:
            for one in {each.line: each for each in facts.broadcasts}.values():
                yield Finding(
                    "loss_broadcast",
                    "error",
                    f"{one.operator} at {one.line}",
                    f"Its inputs {one.first} and {one.second} broadcast to {one.result} in a trial on fake tensors.",
                    "Every prediction is compared with every target: training runs and learns the mean.",
                    "Give both the same shape: target.unsqueeze(1), or prediction.squeeze(1).",
                )
        if "loss_sum" in self._names and facts.error is None and (facts.sum_lines or facts.sums_last):
            growth = gradient_growth(self._case, batch)
            if growth is not None and growth >= self.MIN_GROWTH:
                yield self._sum(growth, str(facts.sum_lines[0]) if facts.sum_lines else "the loss")

    def _sum(self, growth: float, place: str) -> Finding:
        return Finding(
            "loss_sum",
            "warning",
            place,
            f"The gradient grows {growth:.2f} times when the batch holds the same samples twice; with a mean it stays.",
            "The best learning rate changes with the batch size, and a larger batch can make training diverge.",
            'reduction="mean", or divide the sum by the number of samples.',
        )


class SpikeCheck:
    """Check: a finite loss or gradient norm far above those of the steps before."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._arriving: ArrivingValues[tuple[Literal["loss", "gradient norm"], int]] = ArrivingValues()
        # Sees only a few steps, in which a loss may well fall to a fifth: the callback LossSpikes sees all.
        self._windows = {kind: SpikeWindow(warm_up=6, least_ratio=5.0) for kind in ("loss", "gradient norm")}
        self._step = 0
        self._is_sent = False
        self._is_reported = False

    def batch_start(self, _batch: Any, _index: int) -> Iterator[Finding]:
        """A new step begins."""
        self._is_sent = False
        yield from self._judge(wait=False)

    def before_backward(self, loss: Any) -> Iterator[Finding]:
        """Send the loss to the host."""
        if isinstance(loss, Tensor) and loss.numel() == 1 and not self._is_sent:
            self._is_sent = True
            self._arriving.send(loss.detach().clone(), ("loss", self._step))
        yield from ()

    def before_optimizer_step(self, optimizer: Optimizer) -> Iterator[Finding]:
        """Send the gradient's norm to the host."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        plain = [gradient for gradient in gradients if gradient.layout is torch.strided]
        if plain and len(self._case.optimizers) == 1 and len({gradient.device for gradient in plain}) == 1:
            norms = l2_norm_of_each(plain, torch.float32)
            self._arriving.send(torch.stack(list(norms)).norm(), ("gradient norm", self._step))
        yield from ()

    def batch_end(self, _batch: Any, _index: int) -> Iterator[Finding]:
        """Count the step."""
        self._step += 1
        yield from ()

    def conclude(self) -> Iterator[Finding]:
        """Judge the last values."""
        yield from self._judge(wait=True)

    def _judge(self, *, wait: bool) -> Iterator[Finding]:
        for value, (kind, step) in self._arriving.receive(wait=wait):
            spike = self._windows[kind].judge(float(value))
            if spike is not None and not self._is_reported:
                self._is_reported = True
                yield Finding(
                    "loss_spikes",
                    "info",
                    f"step {step}",
                    f"The {kind} is {spike}.",
                    "Such jumps come before a loss that is NaN.",
                    "Clip gradients, lower the learning rate or lengthen its warm-up, and look at this batch. "
                    "LossSpikes() watches the whole training.",
                )
