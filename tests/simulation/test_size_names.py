"""Results told from other sizes are what a FakeTensorMode makes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch.nn import functional

from lightning_memtools._torch import OperatorMode
from lightning_memtools.simulation import repeated_fakes
from lightning_memtools.simulation.fakes import fake_mode
from lightning_memtools.simulation.repeated_fakes import RepeatedFakes
from lightning_memtools.simulation.size_names import SizeNames, has_sizes_of_arguments
from tests.simulation.compared_fakes import ComparedWithFakeTensorMode

aten = torch.ops.aten
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def steps(n, c, h, w, layout):
    """Forward and backward of what is told from other sizes, on tensors of these sizes."""
    x = torch.ones(n, c, h, w).to(memory_format=layout).requires_grad_()
    made = functional.batch_norm(x, torch.zeros(c), torch.ones(c), torch.ones(c), torch.zeros(c), training=True)
    made = functional.gelu(functional.leaky_relu(made) + x * torch.ones(c, 1, 1)) * torch.ones(n, 1, 1, 1)
    evaluated = functional.batch_norm(x, torch.zeros(c), torch.ones(c))
    made = made.to(torch.bfloat16) + torch.where(evaluated > 0, evaluated, 0.0)
    rows = functional.layer_norm(made.float(), (w,), torch.ones(w), torch.zeros(w)).transpose(1, 3)
    rows = rows.softmax(-1) + rows.mean((1, 2), keepdim=True) + rows.sum(0) + rows.contiguous().sum((0, 2, 3)).mean()
    flat = torch.addmm(torch.ones(h), rows.reshape(-1, c), torch.ones(c, h)) @ torch.ones(h, w)
    flat = flat + torch.bmm(rows.flatten(0, 1), torch.ones(n * w, c, w)).flatten(0, 1)
    loss = functional.cross_entropy(flat, torch.ones(len(flat), dtype=torch.int64))
    (loss + functional.embedding(torch.ones(h, w, dtype=torch.int64), flat).mean()).backward()


def test_results_at_other_sizes_are_those_of_a_fake_tensor_mode():
    """Also where sizes are equal by chance, or 1, and where tensors are laid out in another order."""
    sizes = [
        (5, 6, 7, 8),
        (9, 10, 11, 12),
        (3, 4, 2, 13),
        (6, 6, 5, 5),
        (8, 8, 9, 9),
        (4, 1, 3, 2),
        (2, 2, 2, 2),
    ]
    repeated_fakes._known.clear()
    repeated_fakes._known_by_names.clear()
    with fake_mode() as mode, ComparedWithFakeTensorMode(mode) as both:
        for shape, layout in itertools.product(sizes, LAYOUTS):
            steps(*shape, layout)
    named = {one for one in both.compared if has_sizes_of_arguments(one)}
    assert len(named) > 25


def test_a_fake_tensor_mode_is_asked_once_for_many_sizes():
    class Asked(OperatorMode):
        def __init__(self):
            super().__init__()
            self.operators = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operators[func] += 1
            return func(*args, **(kwargs or {}))

    with fake_mode() as mode, Asked() as asked, RepeatedFakes(mode):
        repeated_fakes._known.clear()
        repeated_fakes._known_by_names.clear()
        for n in (5, 7, 9, 13):
            steps(n, n + 1, n + 10, n + 21, torch.contiguous_format)
    # Batch norm both in training and in evaluation.
    once = {aten.native_batch_norm_backward: 2, aten.gelu_backward: 1, aten._log_softmax: 1, aten.addmm: 1}
    assert {one: asked.operators[one.default] for one in once} == once


@pytest.mark.parametrize(
    ("shape", "stride", "order"),
    [
        ((2, 3, 4), (12, 4, 1), (0, 1, 2)),
        ((2, 3, 4), (12, 1, 3), (0, 2, 1)),
        ((5, 1), (1, 1), (0, 1)),
        ((2, 3, 4), (24, 4, 1), None),  # every second row of a larger one
        ((2, 3), (0, 1), None),  # expanded
    ],
)
def test_only_dense_tensors_have_a_layout(shape, stride, order):
    sizes = SizeNames()
    layout = sizes.layout_of(shape, stride, is_new=True)
    assert (None if layout is None else layout[1]) == order
    if layout is not None:
        assert sizes.shape_and_stride(layout) == (shape, stride)
        assert sizes.layout_of((97,), (1,), is_new=False) is None
