"""Results told from other sizes are what a FakeTensorMode makes."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional

from lightning_memtools.simulation import repeated_fakes
from lightning_memtools.simulation.fakes import fake_mode
from lightning_memtools.simulation.size_names import has_sizes_of_arguments
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
