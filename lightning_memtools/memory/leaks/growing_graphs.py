"""Finds autograd graphs that outlive their step, as `self.total += loss` makes them.

Such a graph often occupies hardly any device memory: backward frees what the steps saved, and the nodes that remain
are in host memory. So it cannot be found by counting bytes. Autograd numbers its nodes in the order of their creation,
which tells how far back the graph of a tensor reaches.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import node_sequence_number, saved_tensors_of

# Leaves have no place in the order: autograd gives them the largest number.
_LEAF = 2**64 - 1
# A sum over 100,000 steps has about as many. Visiting them takes a second or two, and happens only for such a sum.
MAX_NODES = 200_000


def graph_clock() -> int:
    """Return the number of the latest autograd node of this thread; later nodes have higher numbers."""
    # An empty tensor without a device: nothing is allocated, and no random number is drawn.
    with torch.inference_mode(mode=False), torch.enable_grad():
        return node_sequence_number(torch.empty(0, device="meta", requires_grad=True).view(0).grad_fn)


def spans(tensor: Tensor, clocks: Sequence[int]) -> bool:
    """Return whether a tensor's graph has nodes from each interval between successive readings of `graph_clock`.

    This is true of a graph that has grown all the time. It is false of the graph of the latest step, even if that also
    holds a node from long ago.
    """
    if tensor.grad_fn is None:
        return False
    missing = set(range(1, len(clocks)))
    # The oldest known node comes first: this follows a chain of sums, and passes by the graphs of single steps.
    heap: list[tuple[int, int, Any]] = [(node_sequence_number(tensor.grad_fn), 0, tensor.grad_fn)]
    seen = {tensor.grad_fn}
    while heap and len(seen) < MAX_NODES:
        number, _, node = heapq.heappop(heap)
        missing.discard(bisect.bisect_left(clocks, number))
        if not missing:
            return True
        if number <= clocks[0]:  # the nodes before it are older still
            continue
        for before, _ in node.next_functions:
            if before is not None and before not in seen and (age := node_sequence_number(before)) != _LEAF:
                seen.add(before)
                heapq.heappush(heap, (age, len(seen), before))  # the count makes ties comparable
    return False


def tensors_saved_by(tensor: Tensor, seen: set[Any]) -> Iterator[Tensor]:
    """Yield the tensors that the graph of a tensor has saved, without those of the nodes seen before.

    Where saved tensors have hooks, as under checkpointing, reading them would run the hooks: they are left out.
    """
    waiting = [tensor.grad_fn]
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from saved_tensors_of(node)
        waiting += [before for before, _ in node.next_functions]
