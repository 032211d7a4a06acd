"""Checks the types of arguments against the annotations of the function that takes them.

Numbers, texts that stand for numbers, and lists of either are left to the function: it knows which of them it accepts.
"""

from __future__ import annotations

import functools
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

_WORDS: Mapping[object, str] = {
    bool: "True or False",
    str: "a text",
    os.PathLike: "a path",
    float: "a number",
    type(None): "None",
    Callable: "a function",
    Sequence: "a list",
    Iterable: "something that can be read in a loop",
}


def check_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise for a value of a type that the function does not take.

    Args:
        function: The function whose annotations say what it takes.
        given: Values by the names of arguments; names that the function does not have are left to it.

    Raises:
        TypeError: A value is of another type.
    """
    for name, accepted in _checked_arguments(function).items():
        if name in given and not any(_is_of(given[name], annotation) for annotation in accepted):
            kinds = dict.fromkeys(_WORDS.get(kind) or _with_article(kind.__name__) for kind in map(_kind, accepted))
            value = given[name]
            got = repr(value) if value is None or isinstance(value, str | Real) else type(value).__name__
            raise TypeError(f"{name} must be {' or '.join(kinds)}, got {got}.")


@functools.cache
def _checked_arguments(function: Callable[..., Any]) -> dict[str, list[Any]]:
    """Return the alternatives of each argument that is checked."""
    found = {name: _alternatives(annotation) for name, annotation in typing.get_type_hints(function).items()}
    return {name: accepted for name, accepted in found.items() if _is_checked(accepted)}


def _is_checked(annotations: list[Any]) -> bool:
    kinds = {*map(_kind, annotations)}
    if any(_kind(one) is Sequence and not _holds_objects(one) for one in annotations):
        return False
    are_classes = all(isinstance(kind, type) or kind is Callable for kind in kinds)
    # The same class exists in lightning and in pytorch_lightning; a file may be of any class.
    are_known = not any("lightning." in getattr(kind, "__module__", "") or kind is typing.IO for kind in kinds)
    return are_classes and are_known and not kinds & {int, Any, object} and not kinds >= {float, str}


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _holds_objects(annotation: Any) -> bool:
    return all(isinstance(inner, type) and inner not in {str, int} for inner in typing.get_args(annotation))


def _alternatives(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in {types.UnionType, typing.Union}:
        return [one for inner in typing.get_args(annotation) for one in _alternatives(inner)]
    if typing.get_origin(annotation) is Literal:
        return [type(value) for value in typing.get_args(annotation)]
    return [annotation]


def _kind(annotation: Any) -> Any:
    """Return the class of which a value must be an instance."""
    kind = typing.get_origin(annotation) or annotation
    return os.PathLike if kind is Path else kind


def _is_of(value: object, annotation: Any) -> bool:
    kind = _kind(annotation)
    if kind is Callable:
        return callable(value)
    if kind is float:
        return isinstance(value, Real)
    if kind is str:  # a text that names a file may be given as a path
        return isinstance(value, str | os.PathLike)
    if kind is not Sequence:
        return isinstance(value, kind)
    (inner,) = typing.get_args(annotation)
    return isinstance(value, Sequence) and all(_is_of(one, inner) for one in value)
