"""The names of parameters, as a person writes them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module

# What torch.compile and older wrappers put into the names.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers around its module."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of(model: Module, parameters: Sequence[Tensor]) -> list[str]:
    """The name of each parameter; one that the model does not hold gets its place among the parameters."""
    known = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [known.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(parameters)]
