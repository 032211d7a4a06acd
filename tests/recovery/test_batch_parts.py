"""Batches of other packages are cut into parts of whole samples."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.recovery.batch_parts import (
    CannotSplitError,
    n_samples_in,
    samples_that_differ,
    split_batch,
)
from lightning_memtools.recovery.joined_parts import join_parts


class Graphs:
    """A batch as PyTorch Geometric has them: graphs of different sizes side by side, with the graph of each node."""

    def __init__(self, x: torch.Tensor, batch: torch.Tensor) -> None:
        self.x, self.batch = x, batch

    @classmethod
    def from_data_list(cls, graphs: Any) -> Graphs:
        return cls(torch.cat(graphs), torch.cat([torch.full((len(one),), i) for i, one in enumerate(graphs)]))

    def to_data_list(self) -> Any:
        return [self.x[self.batch == i] for i in range(int(self.batch.max()) + 1)]


def test_a_batch_of_graphs_is_cut_between_graphs():
    whole = Graphs.from_data_list([torch.full((n, 2), float(n)) for n in (3, 1, 5, 2, 4)])
    assert n_samples_in(whole) == 5
    (one, n_one), (other, n_other) = split_batch(whole, 2)
    assert (n_one, n_other) == (2, 3)
    assert torch.equal(one.batch, torch.tensor([0, 0, 0, 1]))
    assert torch.equal(torch.cat([one.x, other.x]), whole.x)
    assert torch.equal(other.batch, torch.tensor([0] * 5 + [1] * 2 + [2] * 4))


def test_a_batch_encoding_stays_one():
    ids = torch.arange(12).reshape(4, 3)
    parts = split_batch(BatchEncoding({"input_ids": ids, "attention_mask": ids > 2}), 2)
    assert [type(part) for part, _ in parts] == [BatchEncoding, BatchEncoding]
    assert torch.equal(torch.cat([part["input_ids"] for part, _ in parts]), ids)
    assert torch.equal(parts[1][0]["attention_mask"], (ids > 2)[2:])


def test_the_tokens_of_a_batch_encoding_stay_with_their_texts():
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}))
    texts = [["a", "b"], ["b", "c"], ["c", "a"], ["c", "c"]]
    encodings = tokenizer.encode_batch(texts, is_pretokenized=True)
    ids = torch.tensor([one.ids for one in encodings])
    whole = BatchEncoding({"input_ids": ids}, encoding=encodings)
    parts = [part for part, _ in split_batch(whole, 2)]
    assert [[part.tokens(row) for row in range(2)] for part in parts] == [texts[:2], texts[2:]]
    assert [whole.tokens(row) for row in range(4)] == texts


class Pair(NamedTuple):
    image: torch.Tensor
    name: list[str]


def test_nested_containers_are_cut_in_all_their_levels():
    x = torch.arange(8).reshape(4, 2)
    names = ["a", "b", "c", "d"]
    batch = {"pairs": [Pair(x, names), (x + 10, {"deep": x + 20})], "scale": torch.tensor(2.0), "n": 7, "names": names}
    (one, n_one), (other, n_other) = split_batch(batch, 2)
    assert (n_one, n_other) == (2, 2)
    for part, rows in ((one, slice(0, 2)), (other, slice(2, 4))):
        assert type(part["pairs"][0]) is Pair
        assert torch.equal(part["pairs"][0].image, x[rows])
        assert part["pairs"][0].name == names[rows]
        assert torch.equal(part["pairs"][1][0], x[rows] + 10)
        assert torch.equal(part["pairs"][1][1]["deep"], x[rows] + 20)
        assert (part["names"], part["n"], float(part["scale"])) == (names[rows], 7, 2.0)


def test_the_samples_with_least_and_most_padding_are_found():
    ids = torch.ones(6, 5, dtype=torch.long)
    for row, n in enumerate((5, 2, 4, 1, 5, 3)):
        ids[row, n:] = 0
    batch = {"ids": ids, "noise": torch.randn(6, 5), "rows": [*"012345"], "target": torch.arange(6) - 1}
    for most, expected in ((5, ("04", "513")), (3, ("0", "13")), (2, ("0", "3")), (99, ("042", "513"))):
        few, many, both = samples_that_differ(batch, most)
        assert ("".join(few[0]["rows"]), "".join(many[0]["rows"])) == expected
        assert (few[1], many[1], both[1]) == (*map(len, expected), sum(map(len, expected)))
        assert torch.equal(both[0]["ids"], torch.cat([few[0]["ids"], many[0]["ids"]]))
    graphs = Graphs.from_data_list([torch.full((n, 2), float(n)) for n in (3, 1, 5, 2, 4)])
    few, many, _ = samples_that_differ(graphs, 2)
    assert (len(few[0].x), len(many[0].x)) == (5, 1)


def test_what_an_evaluation_step_returned_is_joined_or_refused_but_never_cut_short():
    counts = [2, 2]
    rows = np.arange(4)
    assert join_parts([rows[:2], rows[2:]], counts, is_strict=True).tolist() == [0, 1, 2, 3]
    columns = [(torch.zeros(2), torch.ones(2)), (torch.ones(2), torch.zeros(2))]
    predicted, targets = join_parts(columns, counts, is_strict=True)
    assert predicted.tolist() == [0, 0, 1, 1]
    assert targets.tolist() == [1, 1, 0, 0]
    assert join_parts([{"n": 2}, {"n": 2}], counts, is_strict=True) == {"n": 4}
    with pytest.raises(CannotSplitError, match="values of Tensor that differ"):
        join_parts([{"correct": torch.tensor(1)}, {"correct": torch.tensor(2)}], counts, is_strict=True)


def test_images_and_targets_of_object_detection_are_cut_between_images():
    sizes = (5, 7, 4, 9)
    images = tuple(torch.full((3, size, 8), float(size)) for size in sizes)
    targets = tuple({"boxes": torch.ones(n, 4), "labels": torch.ones(n)} for n in (1, 3, 0, 2))
    batch = (images, targets)
    assert n_samples_in(batch) == 4
    for (part, n), rows in zip(split_batch(batch, 2), (slice(0, 2), slice(2, 4)), strict=True):
        assert n == 2
        assert part == (images[rows], targets[rows])
    few, many, both = samples_that_differ(batch, 3)
    assert (few, many) == ((((images[0],), (targets[0],)), 1), (((images[2:]), (targets[2:])), 2))
    assert both == (((images[0], *images[2:]), (targets[0], *targets[2:])), 3)
    # Of two loaders, each with images and labels, the batch is no list of samples.
    pairs = [[torch.zeros(6, 3), torch.zeros(6)], [torch.zeros(6, 3), torch.zeros(6)]]
    assert n_samples_in(pairs) == 6


class Bag(MutableMapping[str, Any]):
    """Keeps its items in a dictionary of its own, which a copy of the object shares."""

    def __init__(self, name: str) -> None:
        self.name, self.items_by_key = name, dict[str, Any]()

    def __getitem__(self, key: str) -> Any:
        return self.items_by_key[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_by_key[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_key)

    def __len__(self) -> int:
        return len(self.items_by_key)


class Renamed(dict[str, Any]):
    """Has an attribute beside its items."""

    source = ""


def mappings() -> dict[str, Any]:
    items = {"x": torch.arange(8).reshape(4, 2), "names": ["a", "b", "c", "d"], "n": 7}
    bag, renamed = Bag("bag"), Renamed(items)
    bag.update(items)
    renamed.source = "disk"
    return {
        "OrderedDict": OrderedDict(items),
        "defaultdict": defaultdict(list, items),
        "UserDict": UserDict(items),
        "BatchEncoding": BatchEncoding(items),
        "MappingProxyType": MappingProxyType(items),
        "subclass": renamed,
        "own": bag,
    }


@pytest.mark.parametrize("name", mappings())
def test_lists_and_tensors_in_every_mapping_are_cut(name):
    whole = mappings()[name]
    before = dict(whole)
    for rows, (part, n) in zip((slice(0, 2), slice(2, 4)), split_batch([whole, whole["x"]], 2), strict=True):
        assert n == 2
        assert type(part[0]) is type(whole)
        assert list(part[0]) == list(whole)
        assert torch.equal(part[0]["x"], whole["x"][rows])
        assert (part[0]["names"], part[0]["n"]) == (whole["names"][rows], 7)
        assert getattr(part[0], "source", "") == getattr(whole, "source", "")
    assert all(whole[key] is value for key, value in before.items())
    assert whole.keys() == before.keys()


class Frozen(Mapping[str, Any]):
    """Reads its items from elsewhere."""

    def __init__(self, *, path: str) -> None:
        self.path = path

    def __getitem__(self, key: str) -> Any:
        return STORED[key]

    def __iter__(self) -> Iterator[str]:
        return iter(STORED)

    def __len__(self) -> int:
        return len(STORED)


STORED = {"x": torch.arange(8).reshape(4, 2)}


def test_a_mapping_that_takes_no_other_values_is_named():
    with pytest.raises(CannotSplitError, match=r"a Frozen, a mapping .* split_batch\(batch, n_parts\)"):
        split_batch(Frozen(path=""), 2)


@dataclass
class Sheet:
    """A batch of a class of the user's."""

    x: torch.Tensor
    meta: Any


METAS: dict[str, Any] = {
    "dictionaries": [{"file": name, "size": (3, 4)} for name in "abcd"],
    "lists": [[name, 1] for name in "abcd"],
    "tuples": tuple((name, 1) for name in "abcd"),
    "tensors of unequal length": [torch.ones(n) for n in (7, 9, 4, 8)],
    "array": np.array([*"abcd"]),
    "numbers": [torch.tensor(n) for n in range(4)],
}


@pytest.mark.parametrize("kind", METAS)
def test_what_has_an_item_for_each_sample_is_cut_between_items_wherever_it_is(kind):
    x, meta = torch.arange(8 * 4).reshape(4, 8), METAS[kind]
    # Tensors by which the samples are found, whatever the items hold.
    more = [x + i for i in range(8)]
    for make, read in (
        (lambda: (x, meta, *more), lambda part: part[1]),
        (lambda: {"x": [x, *more], "deep": {"meta": meta}}, lambda part: part["deep"]["meta"]),
        (lambda: [Sheet(x, meta), *more], lambda part: part[0].meta),
    ):
        batch = make()
        for (part, n), rows in zip(split_batch(batch, 2), (slice(0, 2), slice(2, 4)), strict=True):
            assert n == 2
            assert type(read(part)) is type(meta)
            assert all(a is b or a == b for a, b in zip(read(part), meta[rows], strict=True))
        few, many, _ = samples_that_differ(batch, 4)
        assert [len(read(group)) for group in (few[0], many[0])] == [2, 2]
        assert read(batch) is meta


def test_columns_stay_columns_also_where_there_are_as_many_as_samples():
    def rows(n: int, *shape: int) -> torch.Tensor:
        return torch.arange(n * 3.0).reshape(n, 3, *shape)

    # Two views of eight samples, each with its targets.
    views = ([rows(8), rows(8)], [{"y": rows(8)}, {"y": rows(8)}])
    assert n_samples_in(views) == 8
    assert [one["y"].tolist() for one in split_batch(views, 2)[1][0][1]] == [rows(8)[4:].tolist()] * 2
    for batch in ([rows(2), rows(2)], {"one": [rows(2), torch.arange(2)]}, [[rows(2), torch.arange(2)]]):
        ((part, n), _) = split_batch(batch, 2)
        assert n == 1
        assert [len(each) for each in tensors_in(part)] == [1, 1]
    for batch in (
        {"x": rows(2), "pair": [rows(2), rows(2)]},
        (rows(2, 1), [{"boxes": rows(2)}, {"boxes": rows(2)}]),
        {"x": rows(2), "words": [("a", "b"), ("c", "d")]},
    ):
        with pytest.raises(CannotSplitError, match=r"2 items of .*, .*samples or columns"):
            split_batch(batch, 2)


def test_a_tuple_of_columns_is_joined_by_columns_whatever_they_are():
    def of_part(first: int) -> Any:
        rows = torch.arange(first, first + 2.0)
        return rows, ["a", "b"], rows.mean()

    rows, names, mean = join_parts([of_part(0), of_part(2)], [2, 2], is_strict=True)
    assert (rows.tolist(), names, float(mean)) == ([0, 1, 2, 3], [*"abab"], 1.5)
    # As many items as samples in each part.
    joined = join_parts([of_part(0)[1::-1], of_part(2)[1::-1]], [2, 2], is_strict=True)
    assert (joined[0], joined[1].tolist()) == ([*"abab"], [0, 1, 2, 3])
    loss, logits = join_parts([of_part(0)[2::-2], of_part(2)[2::-2]], [2, 2], is_strict=True)
    assert (float(loss), logits.tolist()) == (1.5, [0, 1, 2, 3])
    # One item for each sample: predicted tokens, of which some texts have two.
    tokens = [[[1, 2], [3]], [[4], [5, 6]]]
    assert join_parts(tokens, [2, 2], is_strict=True) == [[1, 2], [3], [4], [5, 6]]
    assert join_parts([[[1], [2], [3]], [[4], [5]]], [3, 2], is_strict=True) == [[1], [2], [3], [4], [5]]


@pytest.mark.parametrize(
    ("of_part", "message"),
    [
        (lambda rows: rows[None], "values of Tensor that differ"),  # the samples are in the second dimension
        (lambda rows: (rows, torch.stack([rows, rows, rows])), "values of Tensor that differ"),
        (lambda rows: [{"a": rows}, {"b": rows}], "lists of 2 items of dict, each with 2 rows, which may be samples"),
    ],
)
def test_outputs_that_may_have_their_samples_elsewhere_are_refused_in_evaluation(of_part, message):
    outputs = [of_part(torch.arange(2.0)), of_part(torch.arange(2.0) + 2)]
    with pytest.raises(CannotSplitError, match=message):
        join_parts(outputs, [2, 2], is_strict=True)


def test_joined_mappings_are_of_their_own_class():
    parts = [BaseModelOutput(last_hidden_state=torch.full((2, 3), value)) for value in (1.0, 2.0)]
    joined = join_parts(parts, [2, 2], is_strict=True)
    assert type(joined) is BaseModelOutput
    assert joined.last_hidden_state[:, 0].tolist() == [1, 1, 2, 2]
    assert parts[0].last_hidden_state.shape == (2, 3)
