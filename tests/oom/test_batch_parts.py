"""Batches of other packages are cut into parts of whole samples."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BatchEncoding

from lightning_memtools.oom.batch_parts import n_samples_in, split_batch


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
