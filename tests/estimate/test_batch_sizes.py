"""The search for the largest batch: exact, and in few trials."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memtools.estimate.batch_sizes import TracedSize, largest_batch, resized
from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, replay

MIB = 2**20


def program(n, *, constant=3 * MIB, per_sample=70_000, n_tensors=4):
    """What a small step asks of the allocator at a batch size."""
    allocator = CachingAllocator(AllocatorConfig(), record=True)
    weights = allocator.malloc(constant)
    sizes = [per_sample * n // (i + 1) for i in range(n_tensors)]
    activations = [allocator.malloc(size) for size in sizes]
    for block, size in zip(reversed(activations), reversed(sizes), strict=True):
        gradient = allocator.malloc(size)
        allocator.free(block)
        allocator.free(gradient)
    allocator.free(weights)
    return allocator.trace, allocator.stats().peak_allocated


def search(limit, start=8, **options):
    tried = []

    def attempt(n):
        trace, peak = program(n, **options)
        tried.append(n)
        return TracedSize(replay(trace, capacity=limit).completed, peak, trace)

    return largest_batch(
        start, attempt=attempt, serves=lambda trace: replay(trace, capacity=limit).completed, limit=limit
    ), tried


def fits(n, limit, **options):
    return replay(program(n, **options)[0], capacity=limit).completed


@given(st.integers(5, 4000), st.integers(1, 300), st.integers(100, 200_000), st.integers(1, 6), st.integers(1, 40))
def test_the_answer_fits_and_one_more_does_not(mib, start, per_sample, n_tensors, constant_mib):
    limit = mib * MIB
    options = {"per_sample": per_sample, "n_tensors": n_tensors, "constant": constant_mib * MIB}
    found, tried = search(limit, start, **options)
    assert found == 0 or fits(found, limit, **options)
    assert not fits(found + 1, limit, **options)
    assert len(tried) <= 12


def test_a_program_that_takes_the_same_at_every_size_has_no_answer():
    with pytest.raises(ValueError, match="the batch: at 8 and"):
        search(100 * MIB, per_sample=0, n_tensors=0)


def test_a_model_that_cannot_run_one_sample_is_tried_with_two() -> None:
    """BatchNorm refuses one value per channel in training, where the first guess of a search can be one sample."""

    def search(most: int) -> int:
        def attempt(size: int) -> TracedSize:
            if size == 1:
                raise ValueError("Expected more than 1 value per channel when training")
            return TracedSize(size <= most, 100 * size)

        return largest_batch(1, attempt=attempt, serves=lambda _: False, limit=100 * most, known={64: attempt(64)})

    assert search(13) == 13
    assert search(2) == 2
    assert search(1) == 0


def test_a_batch_of_another_size_repeats_small_tensors_so_that_their_values_can_be_read():
    encoder, (target, weight) = resized(
        (
            {"x": torch.zeros(3, 4), "lengths": torch.tensor([4, 2, 1]), "scale": torch.ones(5)},
            (torch.ones(3, 2), None),
        ),
        size=7,
    )
    assert encoder["lengths"].tolist() == [4, 2, 1, 4, 2, 1, 4]
    assert encoder["x"].shape == (7, 4)
    assert encoder["scale"].shape == (5,)
    assert (target.shape, weight) == ((7, 2), None)
    images = torch.zeros(2, 3, 512, 512).to(memory_format=torch.channels_last)
    assert resized(images, size=9).is_meta
    assert resized(images, size=9).is_contiguous(memory_format=torch.channels_last)
