"""The numbers of parts that batches of a size need, on one rank and on several that run equally many."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.oom.known_sizes import KnownSizes

BATCH = torch.zeros(8)


@pytest.mark.parametrize("failures", [{10: {0}}, {10: {0}, 12: {1}}, {10: {0, 1}}, {10: {0}, 40: {1}, 70: {0}}])
def test_ranks_that_lacked_memory_for_a_while_are_back_at_whole_batches_after_it(failures):
    ranks = KnownSizes(), KnownSizes()
    parts = []
    for step in range(1000):
        known = [sizes.of(BATCH) for sizes in ranks]
        tried = [sizes.parts_to_try(one) for sizes, one in zip(ranks, known, strict=True)]
        n_parts = max(tried)
        for sizes, one, mine in zip(ranks, known, tried, strict=True):
            sizes.note_agreed(one, mine, n_parts)
        if step in failures:
            n_parts *= 2
            for rank in failures[step]:
                known[rank] = ranks[rank].remember(BATCH, known[rank], n_parts)
        for sizes, one in zip(ranks, known, strict=True):
            sizes.note_success(one, n_parts)
        parts.append(n_parts)
    assert parts[:10] == [1] * 10
    assert parts[10:50] == [2] * 40 or len(failures) > 1
    assert parts[500:] == [1] * 500
