"""Reads autograd graphs: the nodes below a loss, their operators, and the lines of code that created them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning_memtools._torch import node_sequence_number
from lightning_memtools.memory.user_code import CodeLine, owner_of

_LEAF = 2**64 - 1
_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')


def nodes_below(node: Any, limit: int, *, leaves: bool = False) -> Iterator[Any]:
    """Yield up to `limit` nodes of an autograd graph, from `node` back toward the leaves, the nearest first.

    AccumulateGrad nodes (one per parameter) outlive the step, and are included only with `leaves=True`.
    """
    queue, seen = deque([node]), {node}
    while queue and limit:
        nearest = queue.popleft()
        limit -= 1
        yield nearest
        for before, _ in nearest.next_functions:
            if before is not None and before not in seen and (leaves or node_sequence_number(before) != _LEAF):
                seen.add(before)
                queue.append(before)


def inputs_of(node: Any) -> list[Any]:
    """Return the autograd nodes that computed a node's inputs. Inputs that do not require gradients have no node."""
    return [before for before, _ in node.next_functions if before is not None]


def operator_of(node: Any) -> str:
    """Return the name of the operator that created an autograd node, such as "Sub" for SubBackward0."""
    return str(node.name()).partition("Backward")[0]


def place_of(node: Any) -> str:
    """Return the operator of an autograd node as a string, with the user's line that ran it if anomaly mode is on."""
    for frame in reversed(node.metadata.get("traceback_", ())):
        match = _FRAME.search(frame)
        if match is not None and owner_of(match[1]) == "user":
            return f"{operator_of(node)} at {CodeLine(match[1], int(match[2]), match[3])}"
    return f"{operator_of(node)} in training_step"
