"""The allocator as a program sees it: what it refuses, and with what words."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, Block, CachingAllocator, SimulatedOutOfMemory, copy_of

MIB = 2**20


def test_nothing_is_no_request() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CachingAllocator().malloc(0)


def test_freeing_twice_is_an_error() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(100)
    allocator.free(block)
    with pytest.raises(ValueError, match=r"freed before"):
        allocator.free(block)
    assert allocator.allocated == 0


def test_the_out_of_memory_error_has_every_figure_of_cudas_message() -> None:
    allocator = CachingAllocator(capacity=100 * MIB, used_by_others=10 * MIB)
    allocator.malloc(41 * MIB)
    allocator.malloc(1000)
    cached = allocator.malloc(20 * MIB)
    allocator.free(cached)
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(61 * MIB - 5, stream=3)
    error = caught.value
    assert error.requested == 61 * MIB - 5
    assert error.rounded == 61 * MIB
    assert error.segment_size == 62 * MIB
    assert (error.capacity, error.used_by_others) == (100 * MIB, 10 * MIB)
    # The cached 20 MiB went back first: 100 - 10 - 42 - 2 are left, and not enough.
    assert error.reserved == 44 * MIB
    assert error.free == 46 * MIB
    # 41 MiB got the whole 42 MiB: a rest of 1 MiB is not split off.
    assert error.allocated == 42 * MIB + 1024
    assert error.allowed is None
    assert "a segment of 62.0 MiB" in str(error)
    stats = allocator.stats()
    assert (stats.alloc_retries, stats.ooms, stats.device_used) == (1, 1, 54 * MIB)


def test_the_memory_fraction_refuses_before_the_device_does() -> None:
    config = AllocatorConfig(per_process_memory_fraction=0.5)
    allocator = CachingAllocator(config, capacity=100 * MIB)
    allocator.malloc(40 * MIB)
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(12 * MIB)
    assert caught.value.allowed == 50 * MIB
    assert caught.value.free == 60 * MIB
    assert "Simulated device out of memory" in str(caught.value)


def test_torch_is_not_imported() -> None:
    code = "import sys, lightning_memtools.memory.allocator; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def layout(allocator: CachingAllocator) -> list[tuple[int, int, int]]:
    return [(block.address, block.size, block.state) for block in allocator.blocks()]


def work(allocator: CachingAllocator, seed: int) -> list[object]:
    """Allocate and free at random, and return what happened and what is there afterwards."""
    draw = random.Random(seed)  # noqa: S311, test data
    held: list[Block] = [block for block in allocator.blocks() if block.allocated]
    happened: list[object] = []
    for _ in range(300):
        if held and draw.random() < 0.45:
            allocator.free(held.pop(draw.randrange(len(held))))
            continue
        try:
            held.append(allocator.malloc(draw.choice([4, 700, MIB, 3 * MIB, 12 * MIB, draw.randint(1, 40 * MIB)])))
            happened.append(held[-1].address)
        except SimulatedOutOfMemory as error:
            happened.append(str(error))
            allocator.empty_cache()
    return [*happened, layout(allocator), allocator.stats()]


@pytest.mark.parametrize("config", ["", "expandable_segments:True", "max_split_size_mb:32"])
def test_a_copy_does_what_its_original_does_and_neither_notices_the_other(config: str) -> None:
    allocator = CachingAllocator(AllocatorConfig.parse(config), capacity=220 * MIB)
    work(allocator, seed=0)
    copy, before = copy_of(allocator), layout(allocator)
    done_by_copy = work(copy, seed=1)
    assert layout(copy) != before
    assert layout(allocator) == before
    assert work(allocator, seed=1) == done_by_copy


def test_a_segment_of_many_blocks_is_no_deeper_than_one_of_few() -> None:
    allocator = CachingAllocator()
    for _ in range(4000):
        allocator.malloc(512)
    assert layout(copy_of(allocator)) == layout(allocator)


def test_an_observed_allocator_is_not_copied() -> None:
    allocator = CachingAllocator(observer=lambda *_: None)
    with pytest.raises(ValueError, match="cannot be copied"):
        copy_of(allocator)
