"""memory_budget beside `activation_memory_budget` of torch.compile: peaks and FLOPs at the same shares.

torch's partitioner runs without a C++ compiler or a GPU; what it makes is not compiled any further here, but run
operator by operator on fake tensors in the simulated allocator, as our plan is. So fusion, which saves more, is not in
the figures of torch.compile, and all figures are the same on every machine. Writes results/checkpointing_compiled.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
from checkpointing_models import encoder, flops, step_of
from machine import save
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, StepPlanner
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.fakes import TensorExchange, fake_mode

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
DEPTH, BATCH = 12, 8
# torch's counter knows attention on CUDA only; this is the same computation on the CPU.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),  # type: ignore[no-untyped-call]
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad, q, k, v)  # type: ignore[no-untyped-call]
    ),
}


def graphs(model: nn.Module, x: torch.Tensor, budget: float) -> tuple[fx.GraphModule, list[Any], fx.GraphModule]:
    """The forward graph, its inputs, and the backward graph that torch's partitioner makes at a budget."""
    found: dict[str, Any] = {}

    def keep(name: str) -> Callable[[fx.GraphModule, list[Any]], Any]:
        def compiler(graph: fx.GraphModule, inputs: list[Any]) -> Any:
            found[name], found[f"{name} inputs"] = graph, inputs
            return make_boxed_func(graph.forward)

        return compiler

    torch._dynamo.reset()
    with functorch_config.patch(activation_memory_budget=budget):
        backend = aot_autograd(
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    return found["forward"], found["forward inputs"], found["backward"]


def compiled(model: nn.Module, x: torch.Tensor, budget: float) -> dict[str, float]:
    forward, inputs, backward = graphs(model, x, budget)

    def run() -> None:
        # Boxed: what a graph was given is free once it was used, as in a compiled program.
        out, *kept = fx.Interpreter(forward).boxed_run(list(given))
        arguments = [*kept, torch.empty_like(out)]
        del kept, out
        fx.Interpreter(backward).boxed_run(arguments)

    with fake_mode():
        given = map_tensors(inputs, TensorExchange())
        out, *kept = fx.Interpreter(forward).run(*given)
        own = {one.untyped_storage()._cdata for one in given if isinstance(one, torch.Tensor)}
        storages = {one.untyped_storage() for one in kept if isinstance(one, torch.Tensor)}
        kept_bytes = sum(one.nbytes() for one in storages if one._cdata not in own)
        del out, kept, storages
        with VirtualDevice() as device:
            device.track(*given)
            static = device.stats().allocated
            run()
            peak = device.stats().peak_allocated
        with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
            run()
    assert peak is not None
    assert static is not None
    return {"activation_bytes": peak - static, "kept_bytes": kept_bytes, "flops": int(counter.get_total_flops())}


def planned(model: nn.Module, shape: tuple[int, ...], budget: float) -> dict[str, float] | None:
    from dataclasses import replace  # noqa: PLC0415, beside its one use

    # On the CPU's operators, as the graphs are. Gradients count as activations here: they are new in every step.
    step = replace(step_of(model, shape), device="cpu")
    gradients = sum(one.numel() * one.element_size() for one in model.parameters())
    try:
        plan = StepPlanner(step).plan(CheckpointOptions.parse(memory_budget=budget))
    except BudgetTooSmallError:
        return None
    assert plan.planned is not None
    peak = plan.planned.peak_bytes - plan.planned.static_bytes + gradients
    kept = sum(chain.kept_bytes for chain in plan.chains)
    return {"activation_bytes": peak, "kept_bytes": kept, "flops": flops(model, shape, plan.chains)}


def main() -> None:
    """Measure both at every budget."""
    model, shape = encoder(DEPTH, 0.0), (BATCH, 128, 256)
    rows = []
    for budget in BUDGETS:
        row: dict[str, Any] = {"budget": budget, "torch_compile": compiled(model, torch.randn(shape), budget)}
        row["planned"] = planned(model, shape, budget) if budget else None
        print(row, flush=True)
        rows.append(row)
    save("checkpointing_compiled", {"model": f"{DEPTH} blocks, batch {BATCH}", "rows": rows})


if __name__ == "__main__":
    main()
