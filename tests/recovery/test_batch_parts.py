"""Batches are split by one plain rule, or not at all."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from lightning_memtools.recovery.batch_parts import CannotSplitError, n_samples_of, split_plainly


class Pair(NamedTuple):
    image: torch.Tensor
    name: list[str]


def rows(n: int = 4) -> torch.Tensor:
    return torch.arange(2 * n).reshape(n, 2)


def test_nested_containers_are_cut_in_all_their_levels():
    x, names = rows(), ["a", "b", "c", "d"]
    pairs = [Pair(x, names), (x + 10, {"deep": x + 20})]
    batch = {"pairs": pairs, "scale": torch.tensor(2.0), "n": 7, "array": x.numpy()}
    parts = split_plainly(batch, 2)
    assert n_samples_of(batch) == 4
    for part, own in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
        assert type(part["pairs"][0]) is Pair
        assert torch.equal(part["pairs"][0].image, x[own])
        assert part["pairs"][0].name == names[own]
        assert torch.equal(part["pairs"][1][0], x[own] + 10)
        assert torch.equal(part["pairs"][1][1]["deep"], x[own] + 20)
        assert (part["n"], float(part["scale"])) == (7, 2.0)
        assert np.array_equal(part["array"], x[own])
    assert parts[0]["pairs"][0].image.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(("n_parts", "sizes"), [(2, [2, 3]), (4, [1, 1, 1, 2]), (8, [1, 1, 1, 1, 1])])
def test_parts_are_of_nearly_equal_size_in_order_and_never_empty(n_parts, sizes):
    parts = split_plainly([rows(5), [*"abcde"]], n_parts)
    assert [len(x) for x, _ in parts] == [len(names) for _, names in parts] == sizes
    assert torch.equal(torch.cat([x for x, _ in parts]), rows(5))


@pytest.mark.parametrize("kind", [dict, OrderedDict, BatchEncoding])
def test_mappings_keep_their_class(kind):
    parts = split_plainly(kind({"input_ids": rows(), "names": [*"abcd"]}), 2)
    assert [type(part) for part in parts] == [kind, kind]
    assert torch.equal(parts[1]["input_ids"], rows()[2:])
    assert parts[1]["names"] == ["c", "d"]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ([rows(4), rows(3)], r"of \[4, 3\] rows"),  # graphs: nodes and targets
        ({"scale": torch.ones(())}, r"of \[\] rows"),
        ([rows(4), {"meta": [3, 224, 224]}], r"of \[4, 3\] rows"),
        (SimpleNamespace(nodes=rows()), "a SimpleNamespace, which has no rows"),
        ([rows(2).to_sparse(), rows(2)], "a tensor of layout torch.sparse_coo"),
        (([torch.zeros(3, 5), torch.zeros(3, 7)], [{"boxes": torch.ones(1, 4)}, {"boxes": torch.ones(2, 4)}]), "rows"),
    ],
)
def test_all_else_is_refused_with_the_words_to_pass(batch, reason):
    with pytest.raises(CannotSplitError, match=f"{reason}.*split_batch=.*loss_weight="):
        split_plainly(batch, 2)
