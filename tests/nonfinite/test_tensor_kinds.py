"""Every reader of tensors takes every kind of tensor, and finds NaN wherever it can be read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_memtools.nonfinite.explain import with_other_samples
from lightning_memtools.nonfinite.finite_checks import bad_inputs, find_bad
from lightning_memtools.nonfinite.operation_trace import OperationTrace, StorageKeys, bad_floats_of, facts_of
from lightning_memtools.nonfinite.step_guard import MicroBatch
from lightning_memtools.nonfinite.step_rerun import digests_of
from lightning_memtools.state.state_snapshot import StateSnapshot

# Sparse and nested tensors warn that they are in beta.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


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


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.tensor([1.0, torch.nan])


def _freed() -> Tensor:
    tensor = torch.tensor([1.0, torch.nan])
    tensor.untyped_storage().resize_(0)
    return tensor


NAN_AND_ONE = torch.tensor([[1.0, torch.nan], [0.0, 2.0]])

# Name to (makes the tensor, whether it holds NaN that can be read).
KINDS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "plain": (NAN_AND_ONE.clone, True),
    "empty": (lambda: torch.empty(0, 3), False),
    "expanded": (lambda: torch.tensor([torch.nan]).expand(1000), True),
    "zero tensor": (lambda: torch._efficientzerotensor((3,)), False),
    "conjugate": (lambda: torch.complex(NAN_AND_ONE, NAN_AND_ONE).conj(), True),
    "integers": (lambda: torch.arange(3), False),
    "coo, not coalesced": (
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, torch.nan]), (2,)),
        True,
    ),
    "csr": (NAN_AND_ONE.to_sparse_csr, True),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.tensor([torch.nan])]), True),
    "meta": (lambda: torch.empty(3, device="meta"), False),
    "fake": (_fake, False),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), False),
    "inference": (_inference, True),
    "freed storage": (_freed, False),
    "uninitialized parameter": (nn.parameter.UninitializedParameter, False),
    "subclass": (lambda: NAN_AND_ONE.as_subclass(Labelled), True),
    "opaque subclass": (lambda: Opaque((3,)), False),
    "float8_e4m3fn": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float8_e4m3fn), False),
    "float4_e2m1fn_x2": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), False),
}


@pytest.mark.parametrize("name", KINDS)
def test_nan_is_found_in_every_kind_of_tensor_that_can_be_read(name):
    make, holds_nan = KINDS[name]
    tensor = make()
    assert (bad_floats_of(tensor) is not None) == holds_nan
    assert bool(find_bad([("it", tensor)])) == holds_nan
    facts = facts_of(tensor)
    assert (facts is not None and "NaN or Inf" in facts.text) == holds_nan
    assert [bad.name for bad in bad_inputs({"it": tensor}, 0)] == ['batch["it"]'] * holds_nan


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_tensor_can_be_kept_and_written(name):
    tensor = KINDS[name][0]()
    StorageKeys().key(tensor)
    StateSnapshot([[tensor]]).restore()
    MicroBatch(0, [tensor]).move_to_host()
    assert digests_of({"it": tensor}) == digests_of({"it": tensor})


# Computing with memory that was freed crashes torch itself.
@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "freed storage"])
def test_operations_on_every_kind_of_tensor_can_be_traced(name):
    tensor, trace = KINDS[name][0](), OperationTrace(nn.Linear(1, 1))
    with warnings.catch_warnings(), trace.watching():
        warnings.simplefilter("ignore")
        for operation in (torch.clone, torch.neg, lambda each: each.detach(), lambda each: each * torch.nan):
            try:
                operation(tensor)
            except (RuntimeError, ValueError, NotImplementedError):  # torch's own refusal
                continue


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "float4_e2m1fn_x2"])  # torch cannot even copy it
def test_every_kind_of_tensor_can_be_in_a_batch_whose_samples_are_replaced(name: str) -> None:
    with_other_samples({"it": KINDS[name][0](), "x": torch.tensor([1.0, torch.nan])}, [1])
