"""Every reader of tensors takes every kind of tensor, and finds NaN wherever it can be read."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from lightning_memtools.nonfinite.explain import with_other_samples
from lightning_memtools.nonfinite.finite_checks import find_bad
from lightning_memtools.nonfinite.guarded_step import MicroBatch, bad_inputs
from lightning_memtools.nonfinite.operation_trace import OperationTrace, StorageKeys, bad_floats_of, facts_of
from lightning_memtools.nonfinite.step_rerun import digests_of
from lightning_memtools.state.state_snapshot import StateSnapshot
from tests.nonfinite.tensor_kinds import KINDS

# Sparse and nested tensors warn that they are in beta.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", KINDS)
def test_nan_is_found_in_every_kind_of_tensor_that_can_be_read(name):
    make, holds_nan = KINDS[name]
    tensor = make()
    assert (bad_floats_of(tensor) is not None) == holds_nan
    assert bool(find_bad([("it", tensor)])) == holds_nan
    facts = facts_of(tensor)
    assert (facts is not None and "NaN or Inf" in facts.text) == holds_nan
    micro = MicroBatch(0, {"it": tensor})
    assert [bad.name for bad in bad_inputs(micro)] == ['batch["it"]'] * holds_nan


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
