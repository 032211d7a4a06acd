"""Switches off the caches of keys and values that language models fill in training, as transformers does itself.

A block that runs again would add its keys and values to the cache a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import nn

from lightning_memtools.checkpointing.chains import forward_of_class, passes_through


class WithoutCaches:
    """Replaces the forward of a model, to switch off its key-value caches in training."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._trained = module.training
        self._inner = vars(module).get("forward") or forward_of_class(module)
        # `generate`, which may run in validation, looks at the names of the arguments.
        self.__signature__ = signature(forward_of_class(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. In training, it runs without key-value caches."""
        if passes_through(self._module, trained=self._trained):
            return self._inner(*args, **kwargs)
        with caches_off(self._module):
            return self._inner(*args, **kwargs)


def modules_with_caches(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with `config.use_cache=True` (key-value caches of transformers), by name."""
    outermost: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        around = any(not other or name.startswith(f"{other}.") for other in outermost)
        if not around and _uses_cache(vars(part).get("config")):
            outermost[name] = part
    return outermost


@contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Context manager: set `use_cache` to False in the `config` of every module of a model."""
    configs: list[Any] = [config for part in model.modules() if _uses_cache(config := vars(part).get("config"))]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an argument of a call is a key-value cache: transformers' Cache or a similar object."""
    return any(
        callable(getattr(type(each), "get_seq_length", None)) and callable(getattr(type(each), "update", None))
        for each in (*args, *kwargs.values())
    )


def _uses_cache(config: Any) -> bool:
    return getattr(config, "use_cache", None) is True
