"""What PyTorch's own tests of its allocator do (test/test_cuda.py), done by PyTorch's CUDA code and by the simulation.

Each program is ours; it allocates in the order in which a test of theirs does, named beside it. Each counter of
`torch.cuda.memory_stats` that the simulation has, and the blocks of every segment, are the same after each step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, Block, CachingAllocator, SimulatedOutOfMemory
from lightning_memtools.memory.allocator.blocks import FREE, UNMAPPED
from tests.null_cuda.null_processes import forks

pytestmark = pytest.mark.cuda_memory

MIB = 2**20
CAPACITY = 256 * MIB

ON_CUDA = """
import json
import torch

settings, steps = json.loads('''{}''')
if settings:
    torch.cuda.memory._set_allocator_settings(settings)
held, seen = {{}}, []
streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]


def request(n_bytes, stream):
    with torch.cuda.stream(streams[stream]):
        return torch.empty(n_bytes, dtype=torch.uint8, device="cuda")


for action, *arguments in steps:
    failed = False
    if action == "request":
        name, n_bytes, stream = arguments
        try:
            held[name] = request(n_bytes, stream)
        except torch.OutOfMemoryError:
            failed = True
    elif action == "free":
        held.pop(arguments[0], None)
    elif action == "fraction":
        torch.cuda.set_per_process_memory_fraction(arguments[0])
    elif action == "reset":
        torch.cuda.reset_peak_memory_stats()
    elif action == "empty":
        torch.cuda.empty_cache()
    blocks = [
        [[block["size"], block["state"] == "inactive"] for block in segment["blocks"]]
        for segment in torch.cuda.memory_snapshot()
    ]
    seen.append([torch.cuda.memory_stats(), sorted(blocks), failed])
print(json.dumps(seen))
"""


def allocate(name: str, n_bytes: int, stream: int = 0) -> tuple[Any, ...]:
    return "request", name, n_bytes, stream


def fail(n_bytes: int) -> tuple[Any, ...]:
    return "request", "fails", n_bytes, 0


def free(*names: str) -> list[tuple[Any, ...]]:
    return [("free", name) for name in names]


@dataclass(frozen=True)
class Program:
    """Settings of the allocator, and steps."""

    steps: list[tuple[Any, ...]]
    settings: str = ""
    fraction: float = 1.0


def random_steps(seed: int) -> list[tuple[Any, ...]]:
    """200 requests and frees of all sizes, on three streams."""
    draw = random.Random(seed)  # noqa: S311, nothing secret
    steps: list[tuple[Any, ...]] = []
    live: dict[str, int] = {}
    for number in range(200):
        n_bytes = draw.choice([draw.randint(1, 4096), draw.randint(1, 2 * MIB), draw.randint(MIB, 30 * MIB)])
        action = draw.random()
        if action < 0.02:
            steps.append(("empty",))
        elif live and (action < 0.4 or sum(live.values()) + n_bytes > 100 * MIB):
            name = draw.choice(sorted(live))
            del live[name]
            steps += free(name)
        elif sum(live.values()) + n_bytes <= 100 * MIB:
            live[str(number)] = n_bytes
            steps.append(allocate(str(number), n_bytes, draw.choice([0, 0, 0, 1, 2])))
    return steps


# Some are named after the tests of test/test_cuda.py whose requests they make; sizes are for a device of 256 MiB.
# Limits that random requests seldom meet.
PROGRAMS = {
    "test_memory_stats": Program(
        [("reset",), allocate("a", 1024), *free("a"), ("empty",), allocate("b", 1500 * 1024), ("reset",), *free("b")]
    ),
    "test_set_per_process_memory_fraction": Program(
        [allocate("small", 4096), ("empty",), allocate("a", int(CAPACITY * 0.48)), *free("a"), ("empty",),
         fail(CAPACITY // 2), allocate("b", 4096)],
        fraction=0.5,
    ),
    "test_set_per_process_memory_fraction, all that was cached": Program(
        [allocate("a", 60 * MIB), allocate("b", 50 * MIB), *free("a", "b"), allocate("c", 100 * MIB)], fraction=0.5
    ),
    "test_caching_allocator_settings, rounding": Program(
        [allocate("a", 1024 * 1024 + 1), allocate("b", 65 * MIB), allocate("c", 3 * MIB), *free("b"),
         allocate("d", 67 * MIB)],
        settings="roundup_power2_divisions:4",
    ),
    "the best fit, and among equals the oldest": Program(
        [allocate("a", 30 * MIB), allocate("b", 12 * MIB), allocate("c", 14 * MIB), allocate("d", 12 * MIB),
         *free("d", "a", "b", "c"), *(allocate(str(mib), mib * MIB) for mib in (13, 11, 10, 9))]
    ),
    "a rest of 1 MiB is not split off, a larger one is": Program(
        [allocate("a", 11 * MIB), allocate("b", 11 * MIB - 512)]
    ),
    "oversize blocks serve no small request, and none that is far smaller": Program(
        [*(step for mib in (60, 70) for step in (allocate("kept", mib * MIB), *free("kept"))), allocate("a", 12 * MIB),
         allocate("b", 40 * MIB), allocate("c", 40 * MIB + 512)],
        settings="max_split_size_mb:40",
    ),
    "a small request releases no oversize block": Program(
        [allocate("a", CAPACITY // 2), allocate("b", CAPACITY // 2), *free("a", "b"), allocate("c", 4)],
        settings="max_split_size_mb:40",
    ),
}  # fmt: skip

FUZZED = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:21",
    "max_split_size_mb:24,max_non_split_rounding_mb:40",
    "expandable_segments:True,max_split_size_mb:32",
    "roundup_power2_divisions:[1:2,2:4,4:8,>:1]",
    "large_segment_size_mb:30",
]
PROGRAMS |= {
    f"test_allocator_fuzz, {settings or 'plain'}, {fraction}": Program(random_steps(seed), settings, fraction)
    for seed, (settings, fraction) in enumerate(product(FUZZED, (1.0, 0.4)))
}


@pytest.fixture(scope="module")
def on_cuda() -> Iterator[Callable[[Program], list[Any]]]:
    """Runs a program on PyTorch's CUDA code, and returns what it saw after each step."""
    with forks("--capacity", f"{CAPACITY}B") as run:
        yield lambda program: json.loads(run(ON_CUDA.format(json.dumps([program.settings, _with_fraction(program)]))))


def _with_fraction(program: Program) -> list[tuple[Any, ...]]:
    return program.steps if program.fraction == 1 else [("fraction", program.fraction), *program.steps]


def simulated(program: Program) -> Iterator[tuple[dict[str, int | None], list[list[list[int]]], bool]]:
    """Run a program on the simulation, and yield counters, blocks and whether a request failed, after each step."""
    settings = program.settings
    if program.fraction != 1:
        settings = f"{settings},per_process_memory_fraction:{program.fraction!r}".removeprefix(",")
    allocator, held = CachingAllocator(AllocatorConfig.parse(settings), capacity=CAPACITY), dict[str, Block]()
    actions: dict[str, Callable[..., object]] = {
        "request": lambda name, n_bytes, stream: held.update({name: allocator.malloc(n_bytes, stream=stream)}),
        "free": lambda name: allocator.free(held.pop(name)) if name in held else None,
        "fraction": lambda _share: None,  # it is one of the settings
        "reset": allocator.reset_peaks,
        "empty": allocator.empty_cache,
    }
    for action, *arguments in _with_fraction(program):
        failed = False
        try:
            actions[action](*arguments)
        except SimulatedOutOfMemory:
            failed = True
        # Torch shows the mapped stretches of an expandable segment one by one.
        blocks = [
            [[block.size, block.state == FREE] for block in stretch]
            for segment in allocator.segments()
            for is_mapped, stretch in groupby(segment.blocks(), lambda block: block.state != UNMAPPED)
            if is_mapped
        ]
        stats = allocator.stats()
        counters = {
            "allocated_bytes.all.current": stats.allocated,
            "allocated_bytes.all.peak": stats.peak_allocated,
            "reserved_bytes.all.current": stats.reserved,
            "reserved_bytes.all.peak": stats.peak_reserved,
            "active_bytes.all.current": stats.active,
            "inactive_split_bytes.all.current": stats.inactive_split,
            "requested_bytes.all.current": stats.requested,
            "num_alloc_retries": stats.alloc_retries,
            "num_ooms": stats.ooms,
        }
        yield counters, sorted(blocks), failed


@pytest.mark.parametrize("name", PROGRAMS)
def test_counters_and_blocks_are_torchs_own_after_every_step(name, on_cuda):
    program = PROGRAMS[name]
    real = on_cuda(program)
    for number, (ours, theirs) in enumerate(zip(simulated(program), real, strict=True)):
        counters, blocks, failed = ours
        step = _with_fraction(program)[number]
        assert failed == theirs[2], step
        if "fuzz" not in name:  # there, any request may fail
            assert failed == ("fails" in step), step
        assert blocks == theirs[1], step
        assert counters == {key: theirs[0][key] for key in counters}, step
