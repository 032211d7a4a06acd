"""Advice that frees what is held, by the kind of its holder."""

from __future__ import annotations

from types import FunctionType, GeneratorType
from typing import Any

from torch.utils.data import Dataset

from lightning_memtools.memory.leaks.holder_search import Holding
from lightning_memtools.memory.leaks.holders import LruCache, TensorHolder, find_holder, is_a


def how_to_free(holding: Holding) -> str:
    """Return advice, with no period at the end, on how to free held tensors: "Clear Net.outs when the epoch ends"."""
    holder = holding.holder
    if holding.is_left_over:
        return "Something still refers to it; `del` that, and let `gc.collect()` run, before the next run begins"
    if holding.owners:
        return "Move it off the device, if no step needs it there: `.cpu()`"
    if holder.is_gradient:
        path = _from_outside(holder, holder.path)
        return f"Set it to None (`{path} = None`), or call `torch.autograd.grad`, which keeps no gradient"
    instead = "`.detach().cpu()`" if holding.with_graph else "`.cpu()` or `.item()`"
    return f"{_release(holding)}, or keep only what is needed, off the device: {instead}"


def _release(holding: Holding) -> str:
    holder, path = holding.holder, _from_outside(holding.holder, holding.holder.container_path)
    variable, is_variable, _ = holder.name.partition(" in ")
    ways = (
        (any(is_a(link, LruCache) for link in holder.links), f"Call `{path}.cache_clear()` when the epoch ends"),
        (
            any(map(_is_metric, holder.links)),
            "Reset the metric when the epoch ends (self.log resets one that it is given)",
        ),
        (_is_of_hook(holder), "Call `handle.remove()` with what registering the hook returned, once it is done"),
        (is_a(holder.root, Dataset), f"Let the data set not keep what it has yielded ({path})"),
        (is_a(holder.root, GeneratorType), f"Close {holder.name} with `close()`"),
        (is_variable, f"`del {variable}` once it is no longer needed, or clear it when the epoch ends"),
        (any(step.is_element for step in holder.steps), f"Clear {path} when the epoch ends"),
    )
    return next((words for applies, words in ways if applies), f"`del {path}` when the epoch ends")


def _from_outside(holder: TensorHolder, path: str) -> str:
    """Return `path`. If a class holds the tensor, begin with the Python module: "my_module.Net.outs"."""
    return f"{holder.root.__module__}.{path}" if is_a(holder.root, type) else path


def _is_metric(link: Any) -> bool:
    return all(callable(getattr(type(link), name, None)) for name in ("update", "compute", "reset"))


def _is_of_hook(holder: TensorHolder) -> bool:
    """Return True if a hook on a module, a tensor or an optimizer holds the tensor."""
    if is_a(holder.root, FunctionType):
        above = find_holder(holder.root, {}, past_functions=True)
        return above is not None and above is not holder and _is_of_hook(above)
    return any(str(step.key).endswith("_hooks") for step in holder.steps)
