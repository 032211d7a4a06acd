"""Checks of autograd graphs that outlive their step, or that an evaluation builds."""

from __future__ import annotations

import weakref
from types import FunctionType
from typing import Any

from torch import Tensor

from lightning_memtools._torch import node_sequence_number
from lightning_memtools.doctor.autograd_nodes import nodes_below
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.leaks.holder_search import names_of_run
from lightning_memtools.memory.leaks.holders import all_tensors, find_holder, is_a
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.reporting.phrases import counted

# So many nodes next to the loss are marked in each step: an output that is kept is near it.
_MARKED_NODES = 200
# So many earlier graphs in a row that are alive are no accident.
_IN_A_ROW = 6


def mark_graph(case: TrainingCase, loss: Tensor) -> None:
    """Attach an object to the autograd graph of a step's first loss, to see later if the graph is still alive."""
    if len(case.marks) <= case.n_steps:
        mark = {case.n_steps}  # of the plain objects, sets can be referred to weakly
        for node in nodes_below(loss.grad_fn, _MARKED_NODES):
            node.metadata["memtools"] = mark
        case.marks.append(weakref.ref(mark))


def retained_graphs(case: TrainingCase, _: Any) -> list[Finding]:
    """Return a finding if something keeps the autograd graphs of earlier steps alive, such as `total_loss += loss`.

    This runs after each step, because such a sum may be reset when an epoch ends.
    """
    # The last two may be alive by right: the latest loss, and an attribute that is about to be replaced.
    earlier = case.marks[:-2]
    if len(earlier) < _IN_A_ROW or any(mark() is None for mark in earlier[-_IN_A_ROW:]):
        return []
    n_alive = sum(mark() is not None for mark in earlier)
    evidence = f"The autograd graphs of {n_alive} of {len(earlier)} earlier steps are alive at step {len(case.marks)}."
    return [finding("retained_graphs", _holder_of_graphs(case), evidence)]


def _holder_of_graphs(case: TrainingCase) -> str:
    """Return the name of the variable or attribute that holds old graphs."""
    held = [
        tensor
        for tensor in all_tensors()
        if tensor.grad_fn is not None
        and any(
            step < case.n_steps - 1
            for node in nodes_below(tensor.grad_fn, _MARKED_NODES)
            for step in node.metadata.get("memtools", ())
        )
    ]
    if not held:
        return "an object that Python's garbage collector does not see"
    newest = max(held, key=lambda tensor: node_sequence_number(tensor.grad_fn))
    others = [one for one in case.others if not is_a(one, FunctionType)]  # these have better names of their own
    holder = find_holder(newest, names_of_run(case.model, [*others, case.stop_at]), ignore=(held,))
    return "a local variable" if holder is None else f"{holder.container_path}{holder.place}"


def evaluation_graphs(outputs: Any) -> list[Finding]:
    """Return a finding if the outputs of an evaluation step still have an autograd graph."""
    with_graph = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    if not with_graph:
        return []
    outputs = counted(len(with_graph), "output", "outputs")
    evidence = f"{outputs} of an evaluation batch came with an autograd graph."
    return [finding("evaluation_graphs", "evaluation step", evidence)]
