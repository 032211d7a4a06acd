"""Values of the data are known to a traced step, and what follows from them alone."""

from __future__ import annotations

import math
from itertools import count, takewhile

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torchmetrics.functional.classification import multiclass_accuracy

from lightning_memtools import VirtualDevice, estimate_memory
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.simulation.fakes import TensorExchange
from lightning_memtools.simulation.known_values import values_known
from lightning_memtools.simulation.simulated import simulated
from lightning_memtools.simulation.step_runner import copy_of_batch

ONES = torch.ones(2, 5, dtype=torch.long)
PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
GRAPHS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
MASK = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0, 1]).bool()
LEVELS = torch.arange(4).repeat_interleave(10)
ROWS = torch.arange(40.0).reshape(10, 4) - 7


class Subclass(Tensor):
    """As torchvision's Image."""


def as_traced(function, *given):
    """The result of a function on fake tensors, its tensors as their shapes; and what was assumed."""
    with values_known() as known, simulated(nn.Identity(), VirtualDevice(), TensorExchange(), cuda=False):
        out = function(*copy_of_batch(given))
        return map_tensors(out, lambda one: one.shape) if not isinstance(out, Tensor) else out.shape, list(
            known.assumed
        )


FUNCTIONS = {
    "size of a readout": lambda x, g, m: torch.zeros(int(g.max()) + 1, 4).index_add_(0, g, x),
    "mask": lambda x, g, m: x[m],
    "of a subclass": lambda x, g, m: x.as_subclass(Subclass)[m.as_subclass(Subclass)],
    "mask from a comparison": lambda x, g, m: x[(g > 0) & m],
    "mask of two dimensions": lambda x, g, m: x[x > 3],
    "mask and index": lambda x, g, m: x[:, :2][m][g[m] > 1],
    "masked_select": lambda x, g, m: torch.masked_select(x, m[:, None]),
    "nonzero": lambda x, g, m: m.nonzero(),
    "where": lambda x, g, m: torch.where(m)[0],
    "unique": lambda x, g, m: torch.unique(g),
    "unique with counts": lambda x, g, m: torch.unique(g, return_counts=True, return_inverse=True),
    "unique rows": lambda x, g, m: torch.unique(g.view(5, 2), dim=0),
    "unique neighbours": lambda x, g, m: torch.unique_consecutive(g),
    "bincount": lambda x, g, m: torch.bincount(g),
    "repeat_interleave": lambda x, g, m: torch.repeat_interleave(torch.arange(3), torch.bincount(g)),
    "split": lambda x, g, m: torch.split(x, torch.bincount(g).tolist()),
    "numpy": lambda x, g, m: torch.from_numpy(np.repeat(np.arange(10), g.numpy())),
    "numpy, by an array": lambda x, g, m: torch.from_numpy(np.repeat(np.arange(10), np.asarray(g))),
    "written in place": lambda x, g, m: x[: int(torch.zeros(3, dtype=torch.long).index_fill_(0, g[:1], 5).sum())],
    "set by a mask": lambda x, g, m: x[g.clone().masked_fill_(m, 9) == 9],
    "set by an index": lambda x, g, m: (g.__setitem__(slice(0, 2), 7), x[g == 7])[1],
    "view of what is changed": lambda x, g, m: (g.view(5, 2).add_(1), x[g == 1])[1],
    "sorted": lambda x, g, m: x[: int(torch.sort(g, descending=True)[0][0])],
    "one of a list": lambda x, g, m: [x[: int(one)] for one in g[:4]],
    "packed, and padded again": lambda x, g, m: pad_packed_sequence(
        pack_padded_sequence(x.view(2, 5, 4), torch.bincount(g)[:2], batch_first=True), total_length=4
    ),
    "full_like what is unknown": lambda x, g, m: x[torch.zeros_like(torch.rand(10)) == 0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_that_follow_from_the_data_are_those_of_the_real_run(name):
    function = FUNCTIONS[name]
    out = function(ROWS.clone(), GRAPHS.clone(), MASK.clone())
    real = out.shape if isinstance(out, Tensor) else map_tensors(out, lambda one: one.shape)
    assert as_traced(function, ROWS, GRAPHS, MASK) == (real, [])


def test_masks_of_a_quarter_of_a_million_floats_are_known():
    """As of a data set that its module cuts into windows, of which some are left out."""
    data = torch.ones(2**18)
    data[:1000] = 0
    assert as_traced(lambda x: x[x > 0], data) == ((2**18 - 1000,), [])


UNKNOWN = {
    "number": (lambda x: x.sum().item(), 1.0),
    "flag": (lambda x: bool(x.sum() > 0.5), True),
    "index": (lambda x: int(x.argmax()), 0),
    "class": (lambda x: torch.unique(x.argmax(1)), (1,)),
    "flag of one value": (lambda x: bool(x[:1, 0] > torch.tensor([0.5])), True),
    "mask": (lambda x: x[x > 0], (40,)),
    "rows": (lambda x: x[x[:, 0] > 0], (10, 4)),
    "nonzero": (lambda x: x.nonzero(), (40, 2)),
    "unique": (torch.unique, (40,)),
    "bincount": (lambda x: torch.bincount((x > 0).long().flatten()), (2,)),
    "any nan": (lambda x: bool(torch.isnan(x).any()), False),
    "all finite": (lambda x: bool(torch.isfinite(x).all()), True),
    "without nan": (lambda x: x[~torch.isnan(x)], (40,)),
    "compared with infinity": (lambda x: bool((x == math.inf).any()), False),
    "compared with itself": (lambda x: bool((x != x).any()), False),  # noqa: PLR0124, how NaN is found
    "choice": (lambda x: "abc"[int(torch.empty(1).uniform_(0, 3).item())], "c"),
    "number of an interval": (lambda x: torch.empty(1).uniform_(0.08, 1.0).item() > 0.9, True),
    "choice by an integer": (lambda x: "abc"[int(torch.randint(3, (1,)))], "b"),
    "levels of the best": (lambda x: torch.unique(LEVELS[x.flatten().topk(20)[1]]), (2,)),
    "a single one, sorted": (lambda x: x.sum().sort()[0].item(), 1.0),
    "levels in an order": (lambda x: torch.unique(LEVELS[torch.argsort(x.flatten())]), (4,)),
    "a loop that draws again": (lambda x: len(list(takewhile(bool, ((x > 0).any() for _ in count())))), 1000),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_assumed_and_named(name):
    function, expected = UNKNOWN[name]
    found, assumed = as_traced(lambda x: function(x * torch.rand(10, 4)), ROWS)
    assert found == expected
    assert len(assumed) == 1
    assert "test_known_values.py:" in assumed[0]


def test_the_classes_of_unknown_scores_are_no_more_than_there_are():
    def accuracy(x):
        return multiclass_accuracy((x * torch.rand(10, 4)).argmax(1), MASK.long(), 4)  # it refuses more

    assert as_traced(accuracy, ROWS)[0] == ()


def test_a_change_by_what_is_not_known_makes_values_unknown():
    def change(mask):
        mask[0] = (torch.rand(5) > 0.5).long()
        return int(mask.sum())

    assert as_traced(change, PADDED) == (1, [next(iter(as_traced(change, PADDED)[1]))])


def test_lengths_are_read_again_where_a_layer_is_recomputed():
    def train(x, lengths):
        lstm = nn.LSTM(4, 4, batch_first=True)

        def layer(x):
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            return lstm(packed)[1][0].sum()

        checkpoint(layer, x.requires_grad_(), use_reentrant=False).backward()
        return x.grad

    assert as_traced(train, torch.randn(3, 5, 4), torch.tensor([5, 5, 2])) == ((3, 5, 4), [])


def test_trained_weights_are_not_known():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), 3.0))
            self.register_buffer("size", torch.tensor(5))

        def forward(self, x):
            if self.weight.max() > 2:
                x = x @ self.weight
            return x[: int(self.size)]

    seen = []
    made = estimate_memory(
        Reads(), torch.ones(8, 4), step=lambda m, x: seen.append(m(x)) or seen[-1].sum() * m.weight.sum()
    )
    assert seen[0].shape == (5, 4)
    (note,) = made.notes
    assert "test_known_values.py" in note


@pytest.mark.parametrize(
    ("mask", "left_out"),
    [
        (ONES, True),
        (ONES.bool(), True),
        (PADDED, False),
        (PADDED.bool(), False),
        (PADDED.repeat(2, 1)[2:], False),  # a part of a larger tensor
        (PADDED[:, :3], True),
        (PADDED.to("meta"), True),  # no values
    ],
)
def test_transformers_leaves_a_mask_out_if_it_is_ones_or_not_known(mask, left_out):
    transformers = pytest.importorskip("transformers")
    from transformers import masking_utils as masking  # noqa: PLC0415, not installed everywhere

    plain = masking.is_tracing
    config = transformers.BertConfig(attn_implementation="sdpa")

    def make(words, mask):
        return masking.create_bidirectional_mask(config, words, mask) is None

    assert as_traced(make, torch.zeros(*mask.shape, 8), mask)[0] is left_out
    assert masking.is_tracing is plain
