"""Every use of torch's private parts, each with the reason why no public way serves and when it can go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

# --- modules

# The public classes have no public base; a user's own may derive from the private one directly.
AnyBatchNorm = _BatchNorm
StatisticsNorm = _NormBase  # BatchNorm and InstanceNorm
AnyDropout = _DropoutNd


def registered_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields names and children; `named_children` leaves out a child that is registered a second time."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


# The pre-forward hook of torch.nn.utils.spectral_norm, and the parametrization of its successor.
_POWER_ITERATIONS = {"SpectralNorm", "_SpectralNorm"}


def iterates_power(module: nn.Module) -> bool:
    """Returns whether a forward pass in training advances a power iteration, so that a second one has another weight.

    Hooks can be added in public, but not listed, and the parametrization's class is private.
    """
    candidates = (module, *module._forward_pre_hooks.values())
    return any(type(one).__name__ in _POWER_ITERATIONS for one in candidates)


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a module has hooks of its own on its call or its backward: they cannot be listed in public."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def compiled_call(module: nn.Module) -> Any:
    """Returns what `module.compile()` put in place of the module's call, or None; there is no public way to ask."""
    return getattr(module, "_compiled_call_impl", None)


# --- nested containers

# The only pytree that torch's own transforms and `checkpoint` share; it can go when torch.utils.pytree is released.
tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten
tree_leaves = pytree.tree_leaves


# --- tensors


def storage_id(storage: UntypedStorage) -> int:
    """Returns the identity of a storage: equal for all views of it, and unique among the living.

    `data_ptr` is 0 for all fake and all empty tensors, and every call of `untyped_storage` makes a new Python object.
    This can go when storages have a public identity.
    """
    identity: int = storage._cdata
    return identity


def write_count(tensor: Tensor) -> int:
    """Returns how often a tensor was written in place; only autograd's version counter tells, and it is not public."""
    return tensor._version


# --- autograd


def node_sequence_number(node: Any) -> int:
    """Returns the number of an autograd node: later nodes have higher ones, and nothing public tells their order."""
    number: int = node._sequence_nr()
    return number


def autograd_sequence_number() -> int:
    """Returns the number that autograd gives to the next operator; the public profiler shows it only afterwards."""
    return torch._C._autograd._get_sequence_nr()


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Returns the hooks for saved tensors that were set last. `saved_tensors_hooks` can only replace them."""
    hooks: tuple[Any, Any] = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003, its only form
    return hooks


def is_jit_tracing() -> bool:
    """Returns whether torch.jit.trace runs; `torch.jit.is_tracing` is public, but not exported for type checkers."""
    tracing: bool = torch._C._is_tracing()
    return tracing
