"""One tensor of every kind that PyTorch has, for functions that have to read any tensor of a user's step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode


class Labelled(Tensor):
    """A subclass with data of its own."""


class Opaque(Tensor):
    """A subclass that holds no memory and refuses every operation."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Self:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} is not for you")


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def _nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.tensor([torch.nan])], layout=layout)


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.tensor([1.0, torch.nan])


def _freed() -> Tensor:
    tensor = torch.tensor([1.0, torch.nan])
    tensor.untyped_storage().resize_(0)
    return tensor


def _small_floats() -> dict[str, Callable[[], Tensor]]:
    names = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2")
    return {name: partial(torch.zeros(4, dtype=torch.uint8).view, getattr(torch, name)) for name in names}


NAN_AND_ONE = torch.tensor([[1.0, torch.nan], [0.0, 2.0]])

# Name to (makes the tensor, whether it holds NaN that can be read).
KINDS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "plain": (NAN_AND_ONE.clone, True),
    "zero dimensions": (lambda: torch.tensor(torch.nan), True),
    "empty": (lambda: torch.empty(0, 3), False),
    "expanded": (lambda: torch.tensor([torch.nan]).expand(1000), True),
    "transposed": (lambda: NAN_AND_ONE.clone().T, True),
    "zero tensor": (lambda: torch._efficientzerotensor((3,)), False),
    "complex": (lambda: torch.complex(NAN_AND_ONE, NAN_AND_ONE), True),
    "conjugate": (lambda: torch.complex(NAN_AND_ONE, NAN_AND_ONE).conj(), True),
    "bfloat16": (NAN_AND_ONE.bfloat16, True),
    "integers": (lambda: torch.arange(3), False),
    "coo, not coalesced": (
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, torch.nan]), (2,)),
        True,
    ),
    "csr": (NAN_AND_ONE.to_sparse_csr, True),
    "nested": (lambda: _nested(torch.strided), True),
    "meta": (lambda: torch.empty(3, device="meta"), False),
    "fake": (_fake, False),
    "quantized": (_quantized, False),
    "inference": (_inference, True),
    "freed storage": (_freed, False),
    "uninitialized parameter": (nn.parameter.UninitializedParameter, False),
    "subclass": (lambda: NAN_AND_ONE.as_subclass(Labelled), True),
    "opaque subclass": (lambda: Opaque((3,)), False),
    "parameter": (lambda: nn.Parameter(NAN_AND_ONE.clone()), True),
    **{name: (make, False) for name, make in _small_floats().items()},
}
