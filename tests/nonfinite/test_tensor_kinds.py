"""Every reader of tensors takes every kind of tensor, and finds NaN wherever it can be read."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from lightning_memtools import replay
from lightning_memtools.nonfinite.explain import with_other_samples
from lightning_memtools.nonfinite.finite_checks import find_bad
from lightning_memtools.nonfinite.guarded_step import MicroBatch, bad_inputs
from lightning_memtools.nonfinite.operation_trace import NAN, OperationTrace, StorageKeys, kinds_of, values_of
from lightning_memtools.nonfinite.step_rerun import digests_of
from lightning_memtools.state.starts import versions_of
from lightning_memtools.state.state_snapshot import StateSnapshot
from tests.lightning_models import Regression, loader
from tests.nonfinite.observe import error_at_halt
from tests.nonfinite.tensor_kinds import KINDS

# Sparse and nested tensors warn that they are in beta.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", KINDS)
def test_nan_is_found_in_every_kind_of_tensor_that_can_be_read(name):
    make, holds_nan = KINDS[name]
    tensor = make()
    assert (NAN in kinds_of(tensor)) == holds_nan
    assert bool(find_bad([("it", tensor)])) == holds_nan
    facts = values_of(tensor)
    assert (facts is not None and facts.n_bad > 0) == holds_nan
    micro = MicroBatch(0, {"it": tensor})
    assert [bad.name for bad in bad_inputs(micro)] == ['batch["it"]'] * holds_nan


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_tensor_can_be_kept_and_written(name):
    tensor = KINDS[name][0]()
    assert len(versions_of([tensor])) == 1
    StorageKeys().key(tensor)
    StateSnapshot([[tensor]]).restore()
    MicroBatch(0, [tensor], versions=(0,)).move_to_host()
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


class ZeroGradient(Regression):
    """A parameter whose gradient has no memory: it comes from a double backward through abs alone."""

    n_zero = 0

    def __init__(self, bad: int = -1) -> None:
        super().__init__()
        self.bad = bad
        self.scale = nn.Parameter(torch.linspace(-1, 1, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (slope,) = torch.autograd.grad(self.scale.abs().sum(), self.scale, create_graph=True)
        return (self.loss(batch) + slope.sum()) * torch.log(torch.tensor(0.0 if batch_idx == self.bad else 2.0))

    def on_after_backward(self) -> None:
        assert self.scale.grad is not None
        self.n_zero += self.scale.grad._is_zerotensor()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_a_step_whose_gradients_have_no_memory_is_explained_and_replayed(tmp_path):
    error = error_at_halt(ZeroGradient(1), loader(24), tmp_path)
    assert error.step == 1
    assert error.explanation.operation == "aten.log"
    again = replay(error.step_path, model=ZeroGradient(1))
    assert again.exact, again.mismatches


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it differentiates forward
def test_operations_under_transforms_can_be_traced():
    trace = OperationTrace(nn.Linear(1, 1))
    x = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    with trace.watching():
        vmap(lambda row: torch.log(row).sum())(x)
        grad(lambda row: torch.log(row).sum())(x[0])
        torch.func.jvp(torch.log, (x,), (torch.ones_like(x),))
    assert {event.operation for event in trace.events} >= {"aten.log"}
