"""Checks of what outlives its step: autograd graphs, and memory that grows; and of graphs that evaluation builds."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import node_sequence_number
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.leaks.growing_graphs import graph_clock, tensors_with_graph
from lightning_memtools.memory.leaks.holders import find_holder, is_a
from lightning_memtools.memory.leaks.holdings import Holding, find_holdings
from lightning_memtools.memory.leaks.leak_detector import SearchScope
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.owned import on_device_of
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.held_words import holding_in_words
from lightning_memtools.reporting.phrases import counted, in_series

# So many nodes next to the loss are marked in each step: an output that is kept is near it.
_MARKED_NODES = 200
_COUNTED_NODES = 100_000
_LEAF = 2**64 - 1


class GraphMark:
    """An object held by a graph node; a weak reference to it shows whether the node is alive."""

    __slots__ = ("__weakref__",)


class RetainedGraphs:
    """Check: the graphs of earlier steps are still alive, as after `total_loss += loss`.

    Each step's graph is marked near its loss with an object that only the graph's nodes hold. A weak reference to the
    object tells whether the graph is alive.
    """

    MIN_STEPS = 4
    MIN_SHARE = 0.8
    IN_A_ROW = 6

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._marks: list[weakref.ref[GraphMark]] = []
        self._clocks: list[int] = []
        self._allocated: list[int] = []
        self._is_marked = False
        self._is_reported = False

    def batch_start(self, _batch: Any, _index: int) -> Iterator[Finding]:
        """A new step begins."""
        self._is_marked = False
        self._clocks.append(graph_clock())
        yield from ()

    def before_backward(self, loss: Any) -> Iterator[Finding]:
        """Mark the first graph of the step."""
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        if node is not None and not self._is_marked:
            self._is_marked = True
            mark = GraphMark()
            for one in nodes_below(node, _MARKED_NODES):
                one.metadata["memtools"] = mark
            self._marks.append(weakref.ref(mark))
        yield from ()

    def batch_end(self, _batch: Any, _index: int) -> Iterator[Finding]:
        """Note the memory."""
        reader = reader_for(self._case.device)
        if reader is not None:
            self._allocated.append(reader.stats().allocated or 0)
        # A sum may be reset at the end of a short epoch, so the graphs are not looked for in the end alone.
        earlier = self._marks[:-2][-self.IN_A_ROW :]
        if len(earlier) == self.IN_A_ROW and all(mark() is not None for mark in earlier):
            yield from self._report()

    def conclude(self) -> Iterator[Finding]:
        """Report if the graphs of nearly all earlier steps are alive."""
        yield from self._report()

    def _report(self) -> Iterator[Finding]:
        # The last two may be alive by right: the latest loss, and an attribute that is about to be replaced.
        earlier = self._marks[:-2]
        n_alive = sum(mark() is not None for mark in earlier)
        if self._is_reported or n_alive < self.MIN_STEPS or n_alive < self.MIN_SHARE * len(earlier):
            return
        self._is_reported = True
        held = self._held_tensors(self._clocks[-2] if len(self._clocks) > 1 else 0)
        name, per_step = self._holder_of(held)
        growth = ""
        if len(self._allocated) > self.MIN_STEPS:
            n_bytes = (self._allocated[-1] - self._allocated[1]) / (len(self._allocated) - 2)
            growth = f" Allocated memory grew by {format_size(max(int(n_bytes), 0))} per step."
        yield Finding(
            "retained_graphs",
            "error",
            name,
            f"The autograd graphs of {n_alive} of {len(earlier)} earlier steps are alive at step {len(self._marks)}"
            f"{per_step}.{growth}",
            "Memory grows with every step until it runs out.",
            "Keep numbers and not graphs: total += loss.detach(), outputs.append(out.detach()).",
        )

    def _scope(self) -> SearchScope:
        # Functions have better names of their own.
        functions = [one for one in self._case.others if is_a(one, FunctionType)]
        objects = [one for one in self._case.others if not is_a(one, FunctionType)]
        scope = SearchScope.around(self._case.model, objects, self._case.stop_at)
        scope.roots += functions
        return scope

    def _held_tensors(self, before: int) -> list[Tensor]:
        """Return tensors that hold a graph with parts from before a step; those that the user's objects hold first."""
        scope = self._scope()
        found = [
            tensor for tensor in tensors_with_graph(scope.roots, stop_at=scope.stop_at) if _reaches(tensor, before)
        ]
        if not found:
            found = [
                one
                for one in gc.get_objects()
                if is_a(one, Tensor) and one.grad_fn is not None and _reaches(one, before)
            ]
        return found

    def _holder_of(self, held: list[Tensor]) -> tuple[str, str]:
        if not held:
            return "an object that Python's garbage collector does not see", ""
        # A sum of losses reaches back furthest.
        newest = max(held, key=lambda tensor: node_sequence_number(tensor.grad_fn))
        holder = find_holder(newest, self._scope().names, ignore=(held,))
        name = "a local variable" if holder is None else f"{holder.container_path}{holder.place}"
        n_nodes = sum(1 for _ in nodes_below(newest.grad_fn, _COUNTED_NODES))
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
        each = (
            f"{len(held)} tensors with {format_size(n_bytes)}"
            if len(held) > 1
            else f"one tensor whose graph has {n_nodes:,} nodes"
        )
        return name, f", held through {each}"


def _reaches(tensor: Tensor, before: int) -> bool:
    return any(node_sequence_number(node) < before for node in nodes_below(tensor.grad_fn, _MARKED_NODES))


def nodes_below(node: Any, limit: int) -> Iterator[Any]:
    """Yield at most `most` nodes of a graph below a node, nearest first, without those of leaves."""
    queue, seen = deque([node]), {node}
    while queue and limit:
        one = queue.popleft()
        limit -= 1
        yield one
        for before, _ in one.next_functions:
            # The nodes of leaves belong to the parameters, and live on from step to step.
            if before is not None and before not in seen and node_sequence_number(before) != _LEAF:
                seen.add(before)
                queue.append(before)


class EvaluationGraphs:
    """Check: evaluation returns outputs that carry an autograd graph."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._is_reported = False

    def evaluation_batch_end(self, outputs: Any) -> Iterator[Finding]:
        """Look for graphs in what the step returned."""
        with_graph = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
        if not with_graph or self._is_reported:
            return
        self._is_reported = True
        n_nodes = sum(1 for _ in nodes_below(with_graph[0].grad_fn, _COUNTED_NODES))
        yield Finding(
            "evaluation_graphs",
            "warning",
            "evaluation step",
            f"{counted(len(with_graph), 'output', 'outputs')} of an evaluation batch came with an autograd graph; the "
            f"first has {n_nodes:,} nodes, and gradients are enabled"
            + ("." if torch.is_grad_enabled() else " inside the step."),
            "Evaluation keeps the activations of the whole forward pass, as training does, for nothing.",
            "with torch.no_grad(): around evaluation, and no enable_grad() in it; detach what is returned.",
        )


MIN_GROWTHS = 6
_MOST_NAMED = 3


class GrowingMemory:
    """Check: memory that is allocated at the end of each step grows in every one, once the optimizer has its state."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._allocated: list[int] = []
        self._capacity: int | None = None

    def batch_end(self, _batch: Any, _index: int) -> Iterator[Finding]:
        """Read the host's counters of the device; a plain CPU has none."""
        reader = reader_for(self._case.device)
        if reader is not None:
            stats = reader.stats()
            self._capacity = stats.capacity
            if stats.allocated is not None:
                self._allocated.append(stats.allocated)
        yield from ()

    def conclude(self) -> Iterator[Finding]:
        """Report growth in every step, and whether the epoch would fill the device."""
        levels = self._allocated[2:]
        growths = [after - before for before, after in itertools.pairwise(levels)]
        if len(growths) < MIN_GROWTHS or min(growths) <= 0:
            return
        per_step = sum(growths) // len(growths)
        room = None if self._capacity is None else self._capacity - levels[-1]
        n_left = None if room is None else room // per_step
        n_batches = self._case.n_train_batches
        fills = n_left is not None and n_batches is not None and n_left < n_batches
        found = [one for one in self._held() if one.piles_up and 10 * one.n_bytes >= sum(growths)]
        who = in_series([holding_in_words(one) for one in found[:_MOST_NAMED]])
        yield Finding(
            "memory_growth",
            "warning" if fills else "info",
            str(self._case.device),
            f"Allocated memory grew in each of {len(growths)} steps after the third, by {format_size(per_step)} on "
            f"average, to {format_size(levels[-1])}."
            + (
                f" {counted(n_left or 0, 'more step fills', 'more steps fill')} the device; an epoch has {n_batches:,}."
                if fills
                else ""
            )
            + (f" What piles up: {who}." if who else ""),
            "Training runs out of memory." if fills else "An epoch's collected outputs do that too, until it ends.",
            ("" if who else "Find what is collected (EmptyCache names it). ")
            + "Keep numbers, or tensors on the host: x.detach().cpu().",
        )

    def _held(self) -> Sequence[Holding]:
        """Return who holds what is on the device beside the model and its optimizers."""
        case, reader = self._case, reader_for(self._case.device)
        if reader is None:
            return ()
        scope = SearchScope.around(case.model, case.others, case.stop_at)
        return find_holdings(on_device_of(reader, case.device), case.model, case.optimizers, None, scope).found
