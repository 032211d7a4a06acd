"""The callbacks that every training should have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from lightning_memtools.callbacks.empty_cache import EmptyCache
from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.callbacks.loss_curves import LossCurves
from lightning_memtools.callbacks.memory_monitor import MemoryMonitor
from lightning_memtools.callbacks.oom_report import OOMReport
from lightning_memtools.callbacks.training_doctor import TrainingDoctor

_DEFAULT = {cls.__name__: cls for cls in (MemoryMonitor, LossCurves, EmptyCache, OOMReport, HaltOnNaN, TrainingDoctor)}


def default_callbacks(**options: Mapping[str, Any] | bool) -> list[Callback]:
    """Return the callbacks that only watch and protect a run, for `Trainer(callbacks=default_callbacks())`.

    Callbacks that change how training runs (gradient checkpointing, batch size) are not among them: add those yourself.

    Args:
        options: Each name is that of a callback. Its value holds the callback's arguments, or False to leave it out:
            `default_callbacks(HaltOnNaN={"max_skips": 3}, TrainingDoctor=False)`. These values can also come from
            a YAML file.

    Raises:
        TypeError: There is no default callback of a given name, a value is neither a mapping nor a bool, or a callback
            has no such argument.
    """
    for name, given in options.items():
        if name not in _DEFAULT:
            raise TypeError(f"default_callbacks() has no {name}; it returns {', '.join(_DEFAULT)}. Add others by name.")
        if not isinstance(given, Mapping | bool):
            raise TypeError(f"{name}={given!r} is neither a mapping of its arguments nor a bool.")
    arguments = {name: {} if (given := options.get(name, True)) is True else given for name in _DEFAULT}
    return [_DEFAULT[name](**given) for name, given in arguments.items() if isinstance(given, Mapping)]
