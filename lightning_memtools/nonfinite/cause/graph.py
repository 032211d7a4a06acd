"""Which node of the autograd graph an operation belongs to: no public way tells."""

from __future__ import annotations

from typing import Any

import torch


def in_backward() -> bool:
    """Whether backward runs."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001, no public way tells


def newest_node() -> int:
    """The number of the node that was made last: it is made, and takes its number, before its operation runs."""
    return int(torch._C._autograd._get_sequence_nr()) - 1  # noqa: SLF001, no public way tells


def node_in_backward() -> int:
    """The number of the node whose backward runs; -1 outside of backward."""
    node: Any = torch._C._current_autograd_node()  # noqa: SLF001, no public way tells
    return -1 if node is None else int(node._sequence_nr())  # noqa: SLF001, as above
