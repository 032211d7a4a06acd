"""Slices backwards, on traces made by hand and on real operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_memtools.nonfinite.explain import PriorTensor, find_bad_value_root, with_other_samples
from lightning_memtools.nonfinite.operation_trace import OperationTrace, facts_of

X = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
MASK = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])


def root_of(compute: Callable[[Tensor], Tensor], x: Tensor = X, mask_is_leaf: bool = False) -> str:
    """The operation that the slice of what `compute` gives ends in, or the leaf."""
    trace = OperationTrace(nn.Module())
    x = x.clone().requires_grad_()
    with trace.watching():
        out = compute(x)
        out.sum().backward()
    bad = out if x.grad is None or not out.isfinite().all() else x.grad
    key_of_x, key_of_bad = trace.memory.key(x), trace.memory.key(bad)
    assert key_of_x is not None
    assert key_of_bad is not None
    leaf = PriorTensor("batch", "x", may_be_infinite=mask_is_leaf)
    root = find_bad_value_root(trace.events, [key_of_bad], {key_of_x: leaf})
    assert root is not None
    return root.leaf.name if root.leaf is not None else root.event.operation


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it differentiates forward
@pytest.mark.parametrize(
    ("compute", "operation"),
    [
        (lambda x: (x / x[0, 0]).exp().mean(), "aten.div"),
        (lambda x: torch.softmax(x + MASK, 1).log().clamp(min=-9).sum() * (x / x).mean(), "aten.div"),
        (lambda x: ((x + MASK) * 0).sum(), "aten.mul"),  # 0 times -inf, where the mask itself is meant
        (lambda x: torch.where(x > 0, x, torch.full_like(x, torch.nan)), "aten.full_like"),
        (lambda x: (x * 1e38 * 1e38) - (x * 1e38 * 1e38), "aten.mul"),  # inf - inf: the infinities were made before
        (lambda x: (x + torch.inf).sum(), "aten.add"),
        (lambda x: torch.where(x > 0, torch.sqrt(x), 0.0), "aten.div"),  # only in backward, 0 times inf
        (lambda x: x.clone().div_(0).mul_(2), "aten.div_"),  # in place
        (lambda x: torch.cat([x.clone().log_(), x]).sum(), "aten.log_"),
        (lambda x: nn.LSTM(2, 2)(x.masked_fill(x >= 0, torch.inf))[0].square(), "aten.mkldnn_rnn_layer"),
        (lambda x: nn.MultiheadAttention(2, 1)(x, x, x, key_padding_mask=torch.ones(2).bool())[0], "aten.softmax"),
        (torch.func.vmap(torch.func.grad(lambda row: row.log().sum())), "aten.div"),
        (lambda x: torch.func.jvp(torch.log, (x,), (torch.ones_like(x),))[0], "aten.log"),
        (lambda x: torch.autograd.grad(x.square().sum(), x, create_graph=True)[0].sqrt(), "aten.div"),  # twice backward
        # Who copies or fills is not named: the NaN is made before its memory is partly overwritten.
        (lambda x: torch.softmax(torch.sqrt(x - 9).masked_fill(torch.eye(2).bool(), -torch.inf), 1), "aten.sqrt"),
        (lambda x: torch.sqrt(x - 9).clone().index_fill(1, torch.tensor([0]), 1.0).square(), "aten.sqrt"),
        (lambda x: x * float((x / 0).detach().max()), "aten.div"),  # through a Python number
    ],
)
def test_the_operation_that_made_the_first_bad_value_is_found(compute, operation):
    assert root_of(compute) == operation


def test_bad_values_that_were_there_before_are_traced_to_where_they_were():
    bad = torch.tensor([[torch.nan, 1.0], [2.0, 3.0]])
    assert root_of(lambda x: (x[0] * 2).log(), bad) == "x"
    assert root_of(lambda x: torch.softmax(x, 1), MASK - torch.inf, mask_is_leaf=True) == "aten.softmax"
    overwritten = root_of(lambda x: torch.log(torch.nan_to_num(x) * 0), bad)
    assert overwritten == "aten.log", "what was bad and is no more has nothing to do with it"


def test_memory_that_is_given_to_another_tensor_is_not_confused():
    def compute(x):
        for _ in range(20):
            (x / 0).sum()  # freed at once
        return torch.log(torch.zeros(2, 2) * x)

    assert root_of(compute) == "aten.log"


def test_value_counts_are_those_of_the_operations_inputs():
    values = facts_of(torch.tensor([[0.0, -5.0], [torch.nan, 2.0], [0.0, 0.0]]))
    counts = "1 of 6 is NaN or Inf, 3 of 6 are 0, 1 of 6 is below 0, largest magnitude 5"
    assert values.text == f"[3, 2] float32 ({counts})"
    assert values.samples == (1,), "of a bad tensor, where it is bad"
    assert facts_of(torch.tensor([[0.0], [1.0], [0.0]])).samples == (0, 2)
    assert facts_of(torch.arange(3)) is None
    assert facts_of(torch.tensor([1, 70000.0]).half()).samples == (1,)


def test_other_samples_take_the_place_of_bad_ones():
    batch = {"x": torch.arange(6.0).view(3, 2), "y": torch.tensor([7, 8, 9])}
    changed, good = with_other_samples(batch, [0, 2])
    assert good == 1
    assert changed["x"].tolist() == [[2, 3]] * 3
    assert changed["y"].tolist() == [8, 8, 8]
    assert batch["y"].tolist() == [7, 8, 9], "the batch itself stays"
    assert with_other_samples(batch, [0, 1, 2]) is None
    assert with_other_samples({"x": torch.ones(3), "y": torch.ones(2)}, [0]) is None
