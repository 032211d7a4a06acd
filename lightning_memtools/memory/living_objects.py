"""Finds objects by their classes among all that Python's garbage collector tracks."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import nn


def instances_of(*classes: type) -> list[Any]:
    """Return all living objects of these classes and of their subclasses."""
    objects = gc.get_objects()
    # Only the types are compared: isinstance would run code of proxies and mocks, and there are a million objects.
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, classes)}
    return [one for one in objects if type(one) in wanted]


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not contained in another module of the list."""
    children = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in children]
