"""Plans beside `activation_memory_budget` of torch.compile, on the models of checkpointing_switches.py.

torch's partitioner divides each model's graphs at several budgets; nothing compiles them further. They run operator by
operator on a device of the dry run, and free what they were given once it was used, as a compiled program does: the
peak of the second step with AdamW is that of PyTorch's own CUDA allocator, without the fusion that a compiler adds.
Beside it stand the FLOPs of matrix products, and the lowest plan that was found with no more of these, to a percent of
the plain step's:
    .venv-cuda/bin/python -m lightning_memtools.null_cuda benchmarks/checkpointing_partitions.py
Adds "partitions" to results/checkpointing_switches.json; names on the command line measure these models only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from checkpointing_switches import MODELS, Case, add, loss_of, lowest_within, planned, with_plan
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from lightning_memtools.checkpointing.key_value_caches import caches_off
from lightning_memtools.simulation.step_trace import StepCost

aten = torch.ops.aten
BUDGETS = (0.5, 0.2, 0.1)


def _batch_norm(*args: Any) -> Any:
    """BatchNorm with its update of the running statistics apart.

    Else graphs that run BatchNorm again in backward would keep the statistics for it, which the step has updated then.
    """
    source, weight, bias, mean, variance, training, momentum, eps = args
    if not training:
        return NotImplemented
    out, own_mean, scale = aten._native_batch_norm_legit.no_stats(source, weight, bias, training, momentum, eps)
    n = source.numel() // source.shape[1]
    own_variance = (scale.pow(-2) - eps) * (n / max(n - 1, 1))
    return out, own_mean, scale, mean.lerp(own_mean, momentum), variance.lerp(own_variance, momentum)


def _batch_norm_backward(*args: Any) -> Any:
    """The backward of BatchNorm does not use the running statistics in training."""
    if not args[7] or args[3] is None:
        return NotImplemented
    return aten.native_batch_norm_backward.default(*args[:3], None, None, *args[5:])


def partitioned(case: Case, budget: float) -> dict[str, int]:
    """The peak of the allocator and the FLOPs of a step whose graphs were divided at a budget."""
    model = case.model.to("cuda")
    batch = tree_map(lambda one: one.to("cuda"), case.batch)
    optimizer = torch.optim.AdamW(model.parameters())
    counted: list[int] = []
    counting = False

    def interpreted(graph: fx.GraphModule, _inputs: Any) -> Any:
        interpreter = fx.Interpreter(graph)

        def run(arguments: list[Any]) -> Any:
            if not counting:
                return interpreter.boxed_run(arguments)
            # Around the graph only: Dynamo compiles nothing while such a mode is on.
            with FlopCounterMode(display=False) as counter:
                out = interpreter.boxed_run(arguments)
            counted.append(int(counter.get_total_flops()))
            return out

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(
        fw_compiler=interpreted,
        bw_compiler=interpreted,
        partition_fn=min_cut_rematerialization_partition,
        decompositions={
            aten._native_batch_norm_legit_functional.default: _batch_norm,
            aten.native_batch_norm_backward.default: _batch_norm_backward,
        },
    )
    with functorch_config.patch(activation_memory_budget=budget), caches_off(model):
        compiled = torch.compile(model, backend=backend)
        for counting in (False, False, True):  # counting takes memory itself
            loss = loss_of(compiled, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss
            if not counting:
                peak = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
    return {"allocator_peak_bytes": peak, "flops": sum(counted)}


def measured(name: str) -> dict[str, Any]:
    case, planner, default, _ = planned(name)
    assert default.plain is not None
    plain = default.plain
    found: dict[str, Any] = {}
    for budget in BUDGETS:
        # In a process of its own: compiled graphs hold memory as long as it lives.
        command = [sys.executable, "-m", "lightning_memtools.null_cuda", __file__, name, str(budget)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            found[str(budget)] = {"failed": ran.stderr.strip().splitlines()[-1]}
        else:
            one = json.loads(ran.stdout.splitlines()[-1])
            best = lowest_within(planner, plain.peak_bytes, partial(_needs_no_more_flops, one, plain), default)
            found[str(budget)] = one | {"ours": None if best is None else with_plan(case, best)}
        print(" ", budget, found[str(budget)], flush=True)
    return found


def _needs_no_more_flops(other: dict[str, int], plain: StepCost, cost: StepCost) -> bool:
    # To a percent of the plain step's: small products, such as those of squeeze and excitation, cost next to nothing.
    return cost.flops <= other["flops"] + 0.01 * plain.flops


def main() -> None:
    """Measure the models named on the command line, or all; with a budget, print what one model has at it."""
    *names, last = sys.argv[1:] or [""]
    if last.replace(".", "").isdigit():
        torch.manual_seed(0)
        print(json.dumps(partitioned(MODELS[names[0]](), float(last))))
        return
    for name in sys.argv[1:] or MODELS:
        print(name, flush=True)
        add(name, {"partitions": measured(name)})


if __name__ == "__main__":
    main()
