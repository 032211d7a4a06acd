"""Batches as users build them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in


class Pair(NamedTuple):
    rows: torch.Tensor
    name: str


@dataclass(frozen=True, slots=True)
class Slotted:
    rows: torch.Tensor


class Plain:
    def __init__(self, rows):
        self.rows = rows
        self.name = "plain"


class Indexed(Mapping[str, torch.Tensor]):
    """As tensordict's TensorDict: it is a mapping, but it iterates over its rows, and takes no key but a row."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def __len__(self):
        return min(map(len, self.tensors.values()))

    def __iter__(self):
        return iter(range(len(self)))

    def __getitem__(self, row):
        return Indexed(**{name: tensor[int(row)] for name, tensor in self.tensors.items()})

    def values(self):
        return self.tensors.values()


ROWS, MORE = torch.zeros(3), torch.ones(4)
NESTED = {
    "tensor": ROWS,
    "list": [ROWS, 1, None],
    "deep": {"a": [(ROWS, {"b": ROWS * 2})], "c": "word"},
    "named tuple": Pair(ROWS, "name"),
    "dataclass": Slotted(ROWS),
    "plain object": Plain(ROWS),
    "user dict": UserDict({"rows": ROWS}),
    "ordered": OrderedDict(first=ROWS, second=MORE),
    "indexed": Indexed(rows=ROWS, more=MORE),
    "proxy": MappingProxyType({"rows": ROWS}),
    "set": {ROWS},
    "deque": deque([ROWS, MORE]),
}


@pytest.mark.parametrize("kind", NESTED)
def test_every_tensor_that_is_found_is_replaced_and_the_original_stays(kind):
    thing = NESTED[kind]
    before = list(tensors_in(thing))
    assert before
    made = map_tensors(thing, lambda tensor: tensor.to("meta"))
    after = list(tensors_in(made))
    assert [tensor.shape for tensor in after] == [tensor.shape for tensor in before]
    assert all(tensor.is_meta for tensor in after)
    assert all(one is other for one, other in zip(before, tensors_in(thing), strict=True))
    assert kind == "proxy" or type(made) is type(thing)


def test_tensors_are_yielded_in_the_order_of_the_containers():
    thing = {"deep": [[[ROWS]]], "shallow": MORE, "again": ROWS}
    assert [id(tensor) for tensor in tensors_in(thing)] == [id(ROWS), id(MORE)]


def test_an_object_that_holds_no_tensor_is_returned_as_it_is():
    word = {"a": [1, "b"]}
    made = map_tensors({"tensor": ROWS, "word": word}, torch.clone)
    assert made["word"] is word
