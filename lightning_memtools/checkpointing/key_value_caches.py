"""Switches off the caches of keys and values that language models fill in training, as transformers does itself.

A block that runs again would add its keys and values to the cache a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def configs_with_caches(model: nn.Module) -> list[Any]:
    """Return the configurations in a model whose `use_cache` is on, each once."""
    found = {id(config): config for part in model.modules() if _uses_cache(config := vars(part).get("config"))}
    return list(found.values())


def modules_with_caches(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules whose configuration has `use_cache` on, by name."""
    found: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        around = any(not one or name.startswith(f"{one}.") for one in found)
        if not around and _uses_cache(vars(part).get("config")):
            found[name] = part
    return found


@contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """While entered, `use_cache` is off in all configurations of a model."""
    configs = configs_with_caches(model)
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call is given a cache of keys and values: a Cache of transformers or one that acts as such."""
    return any(
        callable(getattr(type(one), "get_seq_length", None)) and callable(getattr(type(one), "update", None))
        for one in (*args, *kwargs.values())
    )


def _uses_cache(config: Any) -> bool:
    return getattr(config, "use_cache", None) is True
