"""Words for what is held beside a step, and the judgement if it is why memory ran out."""

from __future__ import annotations

from torch import nn

from lightning_memtools.memory.leaks.holder_search import Holding
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.phrases import counted, in_series

# As a share of what is allocated: less than this is not why memory ran out.
_LEAST_OF_A_CAUSE = 0.05


def holding_in_words(holding: Holding) -> str:
    """Describe the tensors that an object keeps, as in "`Net.outs`, a list of 240 tensors, 120 MiB"."""
    graph = ""
    if holding.with_graph:
        n_tensors = sum(holding.tensors.values())
        some = "" if holding.with_graph >= n_tensors else f"{holding.with_graph} of them "
        one = "its autograd graph and what that saved" if n_tensors == 1 else "autograd graphs and what these saved"
        graph = f", {some}with {one}"
    return f"`{holding.path}`, {_contents(holding)}, {format_size(holding.n_bytes)}{graph}"


def _contents(holding: Holding) -> str:
    """Describe the container that keeps the tensors, and its contents, such as "a list of 240 tensors"."""
    holder, n_tensors = holding.holder, sum(holding.tensors.values())
    container = holder.container
    what = owners_in_words(holding)
    if holder.container_path == holder.path and not holding.owners:
        shape = next(iter(holding.tensors))
        return f"a tensor of {list(shape[0])} {shape[1]}" if n_tensors == 1 else counted(n_tensors, "tensor", "tensors")
    if isinstance(container, nn.Module) and holding.owners:
        return what
    kind = f"a {type(container).__name__}" if container is not None else "what it holds"
    length = len(container) if hasattr(container, "__len__") else n_tensors
    if what:
        return f"{kind} with {what}"
    # The last item may be the failed batch's, which is not counted.
    items = "" if length - 1 <= n_tensors <= length else f" in {counted(length, 'item', 'items')}"
    return f"{kind} of {counted(n_tensors, 'tensor', 'tensors')}{items}"


def owners_in_words(holding: Holding) -> str:
    """Describe the models and optimizers that are kept, as in "the optimizer Adam and 3 models Net"; "" for none."""
    parts = []
    for name, n in holding.owners.items():
        kind, _, of = name.partition(" ")
        parts.append(f"the {name}" if n == 1 else f"{n} {kind}s {of}")
    return in_series(parts)


def is_cause(holding: Holding, allocated: int) -> bool:
    """Return True if kept tensors probably made memory run out: they are large, and grow or are left from another run.

    Other tensors, such as an average of the weights, are a cause only if they take more than half of the memory.

    Args:
        holding: The tensors that an object keeps.
        allocated: All bytes that are allocated on the device.
    """
    return holding.n_bytes > _LEAST_OF_A_CAUSE * allocated and (
        holding.piles_up or holding.is_left_over or 2 * holding.n_bytes > allocated
    )
