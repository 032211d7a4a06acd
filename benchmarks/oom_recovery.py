"""What OOMRecovery costs in a step that does not run out of memory.

Its own work is timed around a step whose forward and backward do nothing, for models with many parameters, with
buffers that are not written, with BatchNorm in training, and while gradients are accumulated. Processor time of this
thread, the least of several rounds: other work on the machine only adds.

    python benchmarks/oom_recovery.py
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from machine import interleaved, save
from torch import nn

from lightning_memtools._lightning import StepClosure
from lightning_memtools.recovery.step_recovery import StepRecovery

STEPS, ROUNDS = 1000, 15


class NoResults(dict[str, Any]):
    """Stands for Lightning's collection of logged values: nothing is logged."""

    batch = batch_size = None


def layers(n: int, *, norm: bool = False, buffers: int = 0) -> nn.Module:
    """N small linear layers, with BatchNorm behind each or with constant buffers."""
    model = nn.Sequential()
    for index in range(n):
        model.append(nn.Linear(4, 4))
        if norm:
            model.append(nn.BatchNorm1d(4))
        if index < buffers:
            model[-1].register_buffer("mask", torch.ones(4))
    return model


def own_cost(model: nn.Module, *, accumulates: bool = False, **options: Any) -> Callable[[], float]:
    """Return a function that measures the microseconds that a step takes with the recovery, less those without."""
    defaults: dict[str, Any] = {"max_splits": 8, "loss": "mean", "allow_batch_norm": False}
    recovery = StepRecovery(model, torch.device("cpu"), **(defaults | options))
    result = SimpleNamespace(closure_loss=torch.zeros(()), extra={})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if accumulates else None
    step = StepClosure(
        torch.zeros(8, 4),
        lambda _batch: result,
        NoResults(),
        backward=lambda _loss: None,
        zero_grad=None if accumulates else lambda: None,
    )

    def bare(step: StepClosure) -> Any:
        found = step.forward(step.batch)
        if step.zero_grad is not None:
            step.zero_grad()
        step.backward(found.closure_loss)
        return found

    def timed(run: Callable[[StepClosure], Any]) -> float:
        for _ in range(20):
            run(step)
        begin = time.thread_time()
        for _ in range(STEPS):
            run(step)
        return (time.thread_time() - begin) / STEPS * 1e6

    return lambda: timed(recovery.run) - timed(bare)


def main() -> None:
    """Measure and save."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cases = {
        "100 parameters": own_cost(layers(50)),
        "1000 parameters": own_cost(layers(500)),
        "100 parameters, 50 constant buffers": own_cost(layers(50, buffers=50)),
        "100 parameters, accumulated gradients": own_cost(layers(50), accumulates=True),
        "200 parameters, 50 BatchNorms, refused": own_cost(layers(50, norm=True)),
        "200 parameters, 50 BatchNorms, allowed": own_cost(layers(50, norm=True), allow_batch_norm=True),
    }
    own = {name: min(samples) for name, samples in interleaved(cases, ROUNDS).items()}
    save("oom_recovery", {"own_us_per_step": {name: round(value, 1) for name, value in own.items()}})


if __name__ == "__main__":
    main()
