"""Autograd graphs that outlive their step, as `self.total += loss` makes them.

Such a graph often costs no device memory to speak of: backward frees what the steps saved, and the nodes that remain
are host memory. So it is not found by counting bytes. Autograd numbers its nodes in the order of their making, which
tells how far back the graph of a tensor reaches.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import node_sequence_number
from lightning_memtools.memory.leaks.steps import content_of, is_a, namespace_of

# Leaves have no place in the order: the largest number stands for that.
_LEAF = 2**64 - 1
# What sums over 100,000 steps accumulate: a second or two to walk, and only if there is such a sum.
MAX_NODES = 200_000
MAX_OBJECTS = 50_000
MAX_ELEMENTS = 1000


def graph_clock() -> int:
    """The number of the latest node of autograd in this thread; later nodes have higher ones."""
    # An empty tensor without a device: nothing is allocated, and no random number is drawn.
    with torch.inference_mode(mode=False), torch.enable_grad():
        return node_sequence_number(torch.empty(0, device="meta", requires_grad=True).view(0).grad_fn)


def spans(tensor: Tensor, clocks: Sequence[int]) -> bool:
    """Whether a tensor's graph has nodes from each of the times between successive readings of `graph_clock`.

    So a graph that has grown all the time does, and that of the latest step does not, not even if it also holds
    something from long ago.
    """
    if tensor.grad_fn is None:
        return False
    missing = set(range(1, len(clocks)))
    # The oldest known node first: in a chain of sums this goes down the chain, and past the graphs of single steps.
    heap: list[tuple[int, int, Any]] = [(node_sequence_number(tensor.grad_fn), 0, tensor.grad_fn)]
    seen = {tensor.grad_fn}
    while heap and len(seen) < MAX_NODES:
        number, _, node = heapq.heappop(heap)
        missing.discard(bisect.bisect_left(clocks, number))
        if not missing:
            return True
        if number <= clocks[0]:  # its own graph is older still
            continue
        for before, _ in node.next_functions:
            if before is not None and before not in seen and (age := node_sequence_number(before)) != _LEAF:
                seen.add(before)
                heapq.heappush(heap, (age, len(seen), before))  # the count makes ties comparable
    return False


def tensors_with_graph(roots: Iterable[Any], *, stop_at: Iterable[Any] = ()) -> Iterator[Tensor]:
    """Tensors with a graph that are held by attributes of the roots, directly or through containers and closures.

    Goes no further than `MAX_OBJECTS` objects, and into the first `MAX_ELEMENTS` elements of a container: it is meant
    to be cheap enough for every epoch, whatever data sets the roots hold.

    Args:
        roots: Modules, callbacks and other objects with attributes.
        stop_at: Objects that are not looked into.
    """
    queue = deque(roots)
    # Objects are kept, not just their identities: some attributes are made anew at each access.
    seen = {id(one): one for one in (*stop_at, *queue)}
    while queue and len(seen) < MAX_OBJECTS:
        for held in _contents(queue.popleft()):
            if type(held) in _PLAIN or id(held) in seen:
                continue
            seen[id(held)] = held
            if is_a(held, Tensor):
                if held.grad_fn is not None:
                    yield held
            elif not is_a(held, (type, ModuleType)):
                queue.append(held)


_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})


def _contents(holder: Any) -> Iterable[Any]:
    contents: Iterable[Any]
    if is_a(holder, dict):
        contents = islice(holder.values(), MAX_ELEMENTS)
    elif is_a(holder, (list, tuple, set, frozenset, deque)):
        contents = islice(holder, MAX_ELEMENTS)
    elif is_a(holder, FunctionType):
        contents = (*map(content_of, holder.__closure__ or ()), *(holder.__defaults__ or ()))
    elif is_a(holder, MethodType):
        contents = (holder.__self__, holder.__func__)
    elif is_a(holder, partial):
        contents = (holder.func, holder.args, holder.keywords)
    else:
        contents = islice((namespace_of(holder) or {}).values(), MAX_ELEMENTS)
    return contents
