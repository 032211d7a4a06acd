"""Confirmation: counts element by element."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memtools.nonfinite.finite_checks import BadTensor, find_bad


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1e20, -3.0, math.nan, math.inf, -math.inf]), min_size=1), max_size=5))
def test_counts_of_non_finite_values_agree_with_python(values):
    named = [(f"t{i}", torch.tensor(each)) for i, each in enumerate(values)]
    expected = [
        (f"t{i}", sum(map(math.isnan, each)), sum(map(math.isinf, each)), len(each))
        for i, each in enumerate(values)
        if not all(map(math.isfinite, each))
    ]
    assert [(b.name, b.n_nan, b.n_inf, b.n_elements) for b in find_bad(named)] == expected


def test_a_norm_that_overflows_is_not_bad():
    assert find_bad([("large", torch.full((100,), 1e20)), ("none", torch.zeros(0))]) == []


def test_the_text_of_a_count_names_numbers_and_share():
    (bad,) = find_bad([("layer.weight", torch.tensor([1.0, torch.nan, torch.inf, torch.nan]))])
    assert str(bad) == "layer.weight (2 NaN and 1 Inf of 4, 75%)"
    assert str(BadTensor("late", None, None, 4, math.inf)) == "late (holds Inf, not counted)"
    assert str(BadTensor("late", None, None, 4, math.nan)) == "late (holds NaN, not counted)"
