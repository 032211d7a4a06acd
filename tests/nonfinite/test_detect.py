"""Detection: the numbers are NaN or Inf exactly if something is."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_memtools.nonfinite.finite_checks import measure, norms_of


def test_norms_are_those_of_torch_for_every_type_in_one_call():
    torch.manual_seed(0)
    tensors = [
        torch.randn(3, 4),
        torch.randn(5).to(torch.float16) * 30000,
        torch.randn(5, dtype=torch.float64),
        torch.randn(2, 2).to(torch.bfloat16),
        torch.randn(7),
    ]
    for tensor, norm in zip(tensors, norms_of(tensors), strict=True):
        assert norm.shape == ()
        assert float(norm) == pytest.approx(float(torch.linalg.vector_norm(tensor.double())), rel=1e-2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("exact", [False, True])
def test_one_bad_element_among_many_makes_the_measure_bad(bad, dtype, exact):
    gradients = [torch.zeros(1000, dtype=dtype), torch.zeros(3, dtype=dtype)]
    assert measure(gradients, [], exact=exact).tolist() == [0, 0]
    gradients[0][617] = bad
    first, second = measure(gradients, [], exact=exact).tolist()
    assert not math.isfinite(first)
    assert second == 0


def test_finite_values_whose_squares_overflow_are_finite_where_it_is_asked():
    gradients = [torch.full((100,), 1e20)]
    assert measure(gradients, []).tolist() == [math.inf]
    assert measure(gradients, [], exact=True).tolist() == pytest.approx([1e21], rel=1e-6)
    half = [torch.full((100,), 6e4, dtype=torch.float16)]
    assert measure(half, [])[0].item() == pytest.approx(6e5, rel=1e-3)
