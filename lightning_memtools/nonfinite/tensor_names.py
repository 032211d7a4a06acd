"""The names of parameters and of other tensors, as a person writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn import Module

from lightning_memtools.memory.nested_tensors import named_tensors

# Added to the names by torch.compile and older wrappers.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers around its module."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of(model: Module, parameters: Sequence[Tensor]) -> list[str]:
    """Return the name of each parameter; one that the model does not hold is named by its position."""
    known = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [known.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(parameters)]


def tensors_in_attributes(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module and its parts keep in plain attributes, neither parameter nor buffer."""
    of_every_module = vars(Module())
    for name, part in model.named_modules():
        prefix = f"{plain_name(name)}." if name else ""
        for key, value in vars(part).items():
            if key not in of_every_module and not key.startswith("_"):
                yield from named_tensors(value, f"{prefix}{key}")
