"""What the simulated caching allocator costs: time per malloc and free, and host memory per recorded event.

One million pairs of malloc and free over a mix of sizes, with 300 blocks alive, as a training step keeps them: half of
the requests small (below 1 MiB, a third of them one of a few common sizes), half large (1 to 25 MiB, some by a few KiB
more than a common size). Times are given twice: as the clock on the wall shows them, and as processor time of this
process, which says more where other work shares the machine.

    python benchmarks/allocator.py
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable

from machine import save, spread

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator
from lightning_memtools.memory.sizes import KIB, MIB

PAIRS = 1_000_000
ALIVE = 300
REPEATS = 5
LAYERS = 200


def requests(seed: int = 0) -> tuple[list[int], list[int]]:
    """Which of the live blocks is freed, and what is asked for then."""
    rng = random.Random(seed)  # noqa: S311, test data

    def size() -> int:
        if rng.random() < 0.5:
            common = rng.random() < 1 / 3
            return rng.choice([4, 512, 4 * KIB, 64 * KIB]) if common else rng.randint(1, MIB)
        return rng.choice([1, 2, 3, 5, 25]) * MIB + rng.randint(0, 5) * 4 * KIB

    return [rng.randrange(ALIVE) for _ in range(PAIRS)], [size() for _ in range(PAIRS)]


def run(
    allocator: CachingAllocator, slots: list[int], sizes: list[int], *, labels: bool = False
) -> tuple[float, float]:
    """Carry out all pairs; seconds on the wall and of processor time."""
    names = [f"layer{index}" for index in range(LAYERS)]
    live = [allocator.malloc(size) for size in sizes[:ALIVE]]
    malloc, free = allocator.malloc, allocator.free
    start = time.perf_counter(), time.process_time()
    if labels:
        for index, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
            free(live[slot])
            live[slot] = malloc(size, label=names[index % LAYERS])
    else:
        for slot, size in zip(slots, sizes, strict=True):
            free(live[slot])
            live[slot] = malloc(size)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def bytes_per_million_calls(slots: list[int], sizes: list[int], *, labels: bool) -> int:
    """Host memory that recording adds, per million calls of malloc and free."""

    def peak(*, record: bool) -> int:
        tracemalloc.start()
        allocator = CachingAllocator(record=record)
        run(allocator, slots, sizes, labels=labels)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held

    return round((peak(record=True) - peak(record=False)) / (2 * PAIRS) * 1_000_000)


def main() -> None:
    slots, sizes = requests()
    expandable = AllocatorConfig(expandable_segments=True)
    limit = AllocatorConfig.parse("max_split_size_mb:64")
    cases: dict[str, Callable[[], tuple[float, float]]] = {
        "default settings": lambda: run(CachingAllocator(), slots, sizes),
        "recorded": lambda: run(CachingAllocator(record=True), slots, sizes),
        "recorded with labels": lambda: run(CachingAllocator(record=True), slots, sizes, labels=True),
        "expandable segments": lambda: run(CachingAllocator(expandable), slots, sizes),
        "max_split_size_mb:64": lambda: run(CachingAllocator(limit), slots, sizes),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(REPEATS):  # in turn, so that a slow moment of the machine hits every case
        for name, case in cases.items():
            samples[name].append(case())
    seconds = {
        name: {
            clock: {**spread(values), "fastest": min(values)}
            for clock, values in zip(("wall", "processor"), zip(*times, strict=True), strict=True)
        }
        for name, times in samples.items()
    }
    save(
        "allocator",
        {
            "what": f"{PAIRS} pairs of malloc and free over a mix of sizes, {ALIVE} blocks alive",
            "seconds": seconds,
            "recording": {
                "host_bytes_per_million_calls": bytes_per_million_calls(slots, sizes, labels=False),
                "host_bytes_per_million_calls_with_a_new_label_each_malloc": bytes_per_million_calls(
                    slots, sizes, labels=True
                ),
            },
        },
    )


if __name__ == "__main__":
    main()
