"""The allocator as a program sees it: what it refuses, and with what words."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, Block, CachingAllocator, SimulatedOutOfMemory, copy_of

MIB = 2**20


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
