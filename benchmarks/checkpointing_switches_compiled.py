"""Adds `activation_memory_budget` of torch.compile to results/checkpointing_switches.json, beside plans.

On a device of the dry run, each model is compiled up to the graphs of torch's partitioner. These run operator by
operator on PyTorch's CUDA allocator, so that the fusion of a compiler, which saves more, is not in the figures:
    .venv-cuda/bin/python -m lightning_memtools.null_cuda benchmarks/checkpointing_switches_compiled.py
Names on the command line measure these models only.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
from checkpointing_switches import MODELS, Case, add, loss_of, lowest_within, planned, with_plan
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import FlopCounterMode

from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.simulation.step_trace import StepCost

BUDGETS = (0.5, 0.2)


def compiled(case: Case, budget: float) -> dict[str, int]:
    """The peak of a second step by PyTorch's allocator, and the FLOPs of its forward and backward graphs."""
    counted: list[int] = []

    def interpreted(graph: fx.GraphModule, _inputs: list[Any]) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            with FlopCounterMode(display=False) as counter:
                out = fx.Interpreter(graph).boxed_run(arguments)
            counted.append(int(counter.get_total_flops()))
            return out

        run._boxed_call = True  # type: ignore[attr-defined]  # what it is given is free once it was used
        return run

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=interpreted, bw_compiler=interpreted, partition_fn=min_cut_rematerialization_partition
    )
    model = copy.deepcopy(case.model).cuda()
    batch = map_tensors(case.batch, lambda one: one.cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    with functorch_config.patch(activation_memory_budget=budget):
        run = torch.compile(model, backend=backend)
        for _ in range(2):
            counted.clear()
            torch.cuda.reset_peak_memory_stats()
            loss = loss_of(run, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss = loss.detach()
    peak = torch.cuda.max_memory_allocated()
    del model, batch, optimizer, run, loss
    torch._dynamo.reset()
    gc.collect()
    return {"allocator_peak_bytes": peak, "flops": sum(counted)}


def _needs_no_more(flops: int, cost: StepCost) -> bool:
    return cost.flops <= flops


def main() -> None:
    """Measure the models named on the command line, or all; the file keeps what it has of them otherwise."""
    for name in sys.argv[1:] or MODELS:
        case, planner, default, _ = planned(name)
        found: dict[str, Any] = {}
        for budget in BUDGETS:
            try:
                one: dict[str, Any] = compiled(case, budget)
            except Exception as error:  # noqa: BLE001, a compiler may fail on a model in any way
                found[str(budget)] = {"why": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
                continue
            accepted = partial(_needs_no_more, one["flops"])
            best = lowest_within(planner, one["allocator_peak_bytes"], accepted, default)
            found[str(budget)] = {**one, "ours": None if best is None else with_plan(case, best)}
            print(name, budget, found[str(budget)], flush=True)
        add(name, {"compiled": found})


if __name__ == "__main__":
    main()
