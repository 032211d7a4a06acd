"""Whatever a program does: the invariants of the allocator hold, and its trace leads to the same state again."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_memtools.memory.allocator import AllocationTrace, replay
from lightning_memtools.memory.allocator.blocks import FREE, UNMAPPED
from tests.memory.allocator.naive import MIB
from tests.memory.allocator.pair import CONFIGS, Pair, layout

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(1, 60 * MIB), st.just(0))
STREAMS = st.sampled_from([0, 0, 5, 6])


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(config=st.sampled_from(CONFIGS), capacity=st.sampled_from([None, 60 * MIB, 200 * MIB]))
    def start(self, config: str, capacity: int | None) -> None:
        self.pair = Pair.of(config, capacity)
        self.pair.set_pool_options(3, no_split=True, use_on_oom=False)
        self.pair.set_pool_options(4, no_split=False, use_on_oom=True)
        self.pair.set_pool_options(5, no_split=True, use_on_oom=True)

    @rule(n_bytes=SIZES, stream=STREAMS, pool=st.sampled_from([0, 0, 0, 2, 3, 4, 5]))
    def malloc(self, n_bytes: int, stream: int, pool: int) -> None:
        if n_bytes == 0:
            assert self.pair.ours.malloc(0, stream=stream, pool=pool) is self.pair.ours.zero_block
            return
        free_before = self.pair.ours.device_free
        if not self.pair.malloc(n_bytes, stream=stream, pool=pool):
            assert free_before is not None  # without a capacity nothing can run out
            assert self.pair.ours.ooms > 0

    @precondition(lambda self: self.pair.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pair.free(data.draw(st.sampled_from(sorted(self.pair.held))))

    @precondition(lambda self: self.pair.held)
    @rule(data=st.data(), stream=STREAMS)
    def record_stream(self, data: st.DataObject, stream: int) -> None:
        self.pair.record_stream(data.draw(st.sampled_from(sorted(self.pair.held))), stream)

    @rule(stream=st.sampled_from([None, 5, 6]))
    def synchronize(self, stream: int | None) -> None:
        self.pair.synchronize(stream)

    @rule()
    def empty_cache(self) -> None:
        self.pair.empty_cache()

    @rule(pool=st.sampled_from([2, 4, 5]))
    def release_pool(self, pool: int) -> None:
        self.pair.release_pool(pool)

    @rule(n_bytes=st.sampled_from([0, 8 * MIB]))
    def others_come_and_go(self, n_bytes: int) -> None:
        self.pair.set_used_by_others(n_bytes)

    @invariant()
    def equal_to_the_naive_allocator(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    @invariant()
    def blocks_tile_their_segments_and_free_neighbours_are_merged(self) -> None:
        if not hasattr(self, "pair"):
            return
        for segment in self.pair.ours.segments():
            blocks = list(segment.blocks())
            assert blocks[0].address == segment.address
            assert blocks[-1].address + blocks[-1].size == segment.address + segment.size
            assert all(block.size > 0 and block.size % 512 == 0 for block in blocks)
            for before, after in pairwise(blocks):
                assert before.address + before.size == after.address
                assert before.next is after
                assert after.prev is before
                assert not (before.state == after.state and before.state in {FREE, UNMAPPED})

    @invariant()
    def pools_add_up(self) -> None:
        if not hasattr(self, "pair"):
            return
        stats = self.pair.ours.memory_stats()
        for name, value in stats.items():
            metric, _, rest = name.partition(".")
            if rest in {"all.current", "all.allocated", "all.freed"}:
                kind = rest.removeprefix("all.")
                assert value == stats[f"{metric}.large_pool.{kind}"] + stats[f"{metric}.small_pool.{kind}"]
            if rest.endswith(".current"):
                pool = rest.removesuffix(".current")
                assert 0 <= value <= stats[f"{metric}.{pool}.peak"]
                assert value == stats[f"{metric}.{pool}.allocated"] - stats[f"{metric}.{pool}.freed"]

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        trace = self.pair.ours.trace
        assert isinstance(trace, AllocationTrace)
        again = replay(trace)
        assert again.completed
        assert again.allocator.memory_stats() == self.pair.ours.memory_stats()
        assert layout(again.allocator) == layout(self.pair.ours)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
