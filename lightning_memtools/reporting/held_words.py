"""Words for what is held beside a step, and the judgement if it is why memory ran out."""

from __future__ import annotations

from lightning_memtools.memory.leaks.holder_search import Holding
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.phrases import counted, in_series

# As a share of what is allocated: less than this is not why memory ran out.
_LEAST_OF_A_CAUSE = 0.05


def holding_in_words(holding: Holding) -> str:
    """Describe the tensors that an object keeps alive, as in "`Net.outs`, a list of 240 tensors, 120 MiB"."""
    graph = ", with autograd graphs and what these saved" if holding.with_graph else ""
    return f"`{holding.path}`, {_contents(holding)}, {format_size(holding.n_bytes)}{graph}"


def _contents(holding: Holding) -> str:
    """Describe what an object keeps alive, as in "a list of 240 tensors" or "the optimizer Adam"."""
    container = holding.holder.container
    if holding.owners:
        return owners_in_words(holding)
    tensors = counted(sum(holding.tensors.values()), "tensor", "tensors")
    is_bare = container is None or holding.holder.container_path == holding.holder.path
    return tensors if is_bare else f"a {type(container).__name__} of {tensors}"


def owners_in_words(holding: Holding) -> str:
    """Describe the models and optimizers that an object keeps alive, as in "the optimizer Adam"; "" for none."""
    parts = []
    for name, n in holding.owners.items():
        kind, _, of = name.partition(" ")
        parts.append(f"the {name}" if n == 1 else f"{n} {kind}s {of}")
    return in_series(parts)


def is_cause(holding: Holding, allocated: int) -> bool:
    """Return True if tensors that an object keeps alive probably made memory run out.

    They must be large. They must also pile up, be left over from another run, or take over half of the memory.

    Args:
        holding: The tensors that an object keeps alive.
        allocated: All bytes that are allocated on the device.
    """
    return holding.n_bytes > _LEAST_OF_A_CAUSE * allocated and (
        holding.piles_up or holding.is_left_over or 2 * holding.n_bytes > allocated
    )
