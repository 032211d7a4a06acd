"""Following values changes no allocation of a function that reads none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in
from lightning_memtools.simulation.followed_functions import FollowedValues
from lightning_memtools.simulation.known_values import KnownValues

pytestmark = pytest.mark.cuda_memory

WANTED = (
    "index", "masked", "where", "take", "gather", "scatter", "select", "repeat_interleave", "tile", "unique",
    "bincount", "nonzero", "argwhere", "sort", "topk", "searchsorted", "bucketize", "put", "cumsum", "diff",
    "roll", "eq", "ne", "lt", "isnan", "isfinite", "allclose", "equal", "nn.functional.embedding",
    "nn.functional.one_hot", "__getitem__", "clamp", "nn.functional.cross_entropy", "nn.functional.nll_loss",
    "histc", "kthvalue", "median", "mode", "triu", "arange", "full", "new_zeros", "zeros_like", "full_like",
)  # fmt: skip
OPERATORS = [one for one in op_db if one.name.startswith(WANTED) and torch.float32 in one.dtypes]


def peak(function: Any, given: Any, values: KnownValues | None) -> int:
    """The bytes that a call allocates beside its arguments, at most; the result is freed."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if values is None:
        function(given)
    else:
        for on_device, tensor in zip(tensors_in(given), tensors_in(map_tensors(given, Tensor.cpu)), strict=True):
            values.note(on_device, tensor)
        with FollowedValues(values):
            function(given)
    return torch.cuda.max_memory_allocated() - before


def reads_no_value(function: Any, given: Any) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(given)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def test_operators_that_read_no_values_allocate_what_they_do_without_following():
    different, n_compared = {}, 0
    for operator in OPERATORS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = next(iter(operator.sample_inputs("cpu", torch.float32)))
            given = map_tensors([sample.input, list(sample.args), sample.kwargs], Tensor.cuda)

            def run(given, operator=operator):
                return operator.op(given[0], *given[1], **given[2])

            if reads_no_value(run, given):
                n_compared += 1
                plain, followed = peak(run, given, None), peak(run, given, KnownValues())
                if plain != followed:
                    different[f"{operator.name} {operator.variant_test_name}"] = plain, followed
    assert n_compared > 50
    assert different == {}
