"""The callbacks that the options of `memtools run` select, validated before a script starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import lightning_memtools
from lightning_memtools._lightning import Callback
from lightning_memtools.callbacks.presets import default_callbacks


def asked_callbacks(
    *, add: Sequence[str] = (), leave_out: Sequence[str] = (), arguments: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Callback]:
    """Return the callbacks of `default_callbacks()`, with some added, left out, or created with other arguments.

    Args:
        add: The names of other callbacks of this package to add.
        leave_out: The names of default callbacks to leave out.
        arguments: Keyword arguments for callbacks, as {callback name: {argument: value}}.

    Raises:
        ValueError: A name is unknown, or a callback does not accept an argument. The message suggests similar names.
    """
    public = {name: getattr(lightning_memtools, name) for name in lightning_memtools.__all__}
    every = {name: kind for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, Callback)}
    for name in (*add, *leave_out, *(arguments or {})):
        if name not in every:
            raise ValueError(f"There is no callback {name}.{_near(name, every)}")
    names = list(dict.fromkeys([*(type(each).__name__ for each in default_callbacks()), *add]))
    chosen = [name for name in names if name not in leave_out]
    for name, given in (arguments or {}).items():
        if name not in chosen:
            raise ValueError(f"{name} is given arguments, but is not among the callbacks: add --with {name}.")
        known = inspect.signature(every[name]).parameters
        for argument in given:
            if argument not in known:
                raise ValueError(f"{name} has no argument {argument}.{_near(argument, known)}")
    return [_made(every[name], (arguments or {}).get(name, {})) for name in chosen]


def _made(kind: Any, arguments: Mapping[str, Any]) -> Callback:
    try:
        made: Callback = kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind.__name__}: {error}") from error
    return made


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.5) or list(known)
    return f" Did you mean {' or '.join(near)}?" if len(near) <= 3 else f" There are {', '.join(near)}."  # noqa: PLR2004
