"""Checks that read the autograd graph of a loss: inputs that broadcast, batch sums, graphs that outlive their step."""

from __future__ import annotations

import itertools
import math
import weakref
from types import FunctionType
from typing import Any

from torch import Tensor

from lightning_memtools._torch import node_sequence_number, output_shape, saved_reduction
from lightning_memtools.doctor.autograd_nodes import inputs_of, nodes_below, operator_of, place_of
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import finding
from lightning_memtools.doctor.training_case import Shape, SumOverBatch, TrainingCase, without_ones
from lightning_memtools.memory.leaks.holder_search import names_of_run
from lightning_memtools.memory.leaks.holders import all_tensors, find_holder, is_a
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.reporting.phrases import counted

_NEAR_THE_LOSS = 200
# F.mse_loss and the like, whose two inputs broadcast, and differences.
_COMPARE = {"Sub", "Rsub", "MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss"}
# Operators that pass a loss on, up to a factor or a further term.
_PASS_ON = {"Mul", "Div", "Neg", "Add", "Sub", "Clone", "ToCopy", "Squeeze", "Mean"}
_SUM = 2  # torch's number of reduction="sum"


def loss_broadcast(case: TrainingCase, loss: Tensor) -> list[Finding]:
    """Return findings on operations near the first loss that broadcast a prediction to its target by mistake."""
    found = {}
    for node in nodes_below(loss.grad_fn, _NEAR_THE_LOSS):
        shapes = _broadcast(case, node)
        if shapes is not None:
            evidence = f"The prediction of shape {shapes[0]} broadcasts to {shapes[1]} against its target."
            found[place_of(node)] = finding("loss_broadcast", place_of(node), evidence)
    return list(found.values())


def _broadcast(case: TrainingCase, node: Any) -> tuple[Shape, Shape] | None:
    """Return (prediction's shape, result's shape) if this node broadcasts a prediction by mistake, else None.

    Such a node compares the prediction with a target, and its result is larger than the prediction by a factor of the
    batch size. If the prediction was unsqueezed, this is intended, for example to compute pairwise distances.
    """
    inputs = inputs_of(node)
    if operator_of(node) not in _COMPARE or len(inputs) != 1 or case.batch_size == 1:
        return None
    source, result = inputs[0], output_shape(node)
    if operator_of(source) == "Expand":  # F.mse_loss and the like expand their inputs before they compare them
        source, result = inputs_of(source)[0], output_shape(source)
    shape = output_shape(source)
    if shape is None or result is None or operator_of(source) == "Unsqueeze":
        return None
    is_squared = math.prod(result) == math.prod(shape) * case.batch_size
    return (shape, result) if is_squared and without_ones(shape) in case.batch_shapes else None


def note_sums(case: TrainingCase, loss: Tensor) -> None:
    """Find the terms of the first loss that sum over the batch, and record the gradients that lead to each of them."""
    if case.batch_size > 1 and not case.computes_nothing:
        case.sums = _sums(case.batch_size, loss.grad_fn, ())


def _sums(batch_size: int, node: Any, way: tuple[list[Tensor], ...]) -> list[SumOverBatch]:
    """Return the sums over the batch behind `node`. `way`: the gradients recorded at nodes from the loss to `node`."""
    gradients: list[Tensor] = []
    node.register_prehook(lambda arriving: gradients.extend(one.detach() for one in arriving if one is not None))
    way = (*way, gradients)
    inputs = inputs_of(node)
    if operator_of(node) == "Sum" or saved_reduction(node) == _SUM:
        shape = output_shape(inputs[0])
        # A sum over a parameter's own values is a penalty on weights.
        near = nodes_below(node, 8, leaves=True)
        is_penalty = any(hasattr(leaf, "variable") and output_shape(leaf) == shape for leaf in near)
        if not shape or math.prod(shape) == 1 or shape[0] % batch_size or is_penalty:
            return []
        return [SumOverBatch(place_of(node), shape, way)]
    if operator_of(node) not in _PASS_ON:
        return []
    scalars = [before for before in inputs if without_ones(output_shape(before) or ()) == ()]
    return [found for before in scalars for found in _sums(batch_size, before, way)]


def loss_sum(case: TrainingCase, _: Any) -> list[Finding]:
    """Return a finding if the loss is a sum over the batch that is never divided by the batch size.

    The recorded gradients tell by which factors the sum is multiplied to get the loss. A factor that is neither an
    integer nor 0.5 is assumed to be a division by the number of samples, elements or tokens.
    """
    for one in case.sums:
        arrived = [float(gradients[0]) for gradients in one.way if gradients]
        factors = [after / before for before, after in itertools.pairwise(arrived) if before]
        lightnings = [i for i, factor in enumerate(factors) if math.isclose(factor, 1 / case.accumulate, rel_tol=1e-3)]
        if case.accumulate > 1 and lightnings:  # it divides by the number of batches per update
            del factors[lightnings[0]]
        weight = abs(math.prod(factors))
        if len(arrived) == len(one.way) and all(arrived) and all(_is_constant(abs(factor)) for factor in factors):
            evidence = (
                f"The loss sums {math.prod(one.shape):,} values of shape {one.shape} over {case.batch_size} samples, "
                f"each with the weight {weight:g}; in a mean over the samples it is {weight / case.batch_size:g}."
            )
            return [finding("loss_sum", one.place, evidence)]
    return []


def _is_constant(factor: float) -> bool:
    return math.isclose(factor, 0.5 if factor < 1 else round(factor), rel_tol=1e-3)


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
