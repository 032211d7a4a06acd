"""Copies of models and batches whose tensors have shapes but no data."""

# ruff: noqa: SLF001 - modules, autograd and storages are looked at through torch's own underscored parts, as torch's tools do
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset


def fake_tensor(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and type on the CPU; call it within a FakeTensorMode.

    On the CPU, because a fake tensor of a device that the build of torch does not have aborts the process in autograd.
    """
    if nn.parameter.is_lazy(tensor):
        raise TypeError("the model has lazy parameters without a shape; run one batch through it first")
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_model(model: nn.Module) -> nn.Module:
    """A deep copy with fake parameters and buffers, so that nothing run with it leaves a trace in the model.

    Call it within a FakeTensorMode. Data sets and loaders are shared, not copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = fake_tensor(value)
            elif isinstance(value, (Dataset, DataLoader)):
                memo[id(value)] = value
    with _FakeCopies():
        return copy.deepcopy(model, memo)


class _FakeCopies(TorchFunctionMode):
    """Within, a deep copy of a tensor is a fake one, wherever it is found: in a dictionary or an object of the user's.

    torch's own copy would share the storage of a real tensor with a fake one, which is an error.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = fake_tensor(tensor)
        return memo[id(tensor)]


def fake_values(values: Any) -> Any:
    """Nested containers with every tensor replaced by a fake one; call it within a FakeTensorMode."""
    return tree_map(lambda value: fake_tensor(value) if isinstance(value, Tensor) else value, values)


def fake_mode() -> FakeTensorMode:
    """A mode in which real tensors that a step brings along are taken for fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)
