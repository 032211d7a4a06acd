"""The cached blocks: which one serves a request, how it is split, and how free ones merge.

The functions of c10/cuda/CUDACachingAllocator.cpp whose rules these are: get_pool, get_free_block, should_split,
alloc_found_block, free_block and try_merge_blocks.
"""

from __future__ import annotations

from bisect import bisect_left

from lightning_memtools.memory.allocator.blocks import ADDRESS_BITS, FREE, UNMAPPED, Block, FreeBlocks
from lightning_memtools.memory.allocator.config import AllocatorConfig
from lightning_memtools.memory.allocator.rounding import SMALL_LIMIT
from lightning_memtools.memory.allocator.tally import Tally

# Larger than any request: without max_split_size every comparison with it says that a block may be split.
_NO_LIMIT = 1 << 62


class BlockCache:
    """All free blocks, by stream and pool.

    Attributes:
        small: Counts over all small pools.
        large: Counts over all large pools.
        whole: Counts over all pools.
        lookups: How often a large block of the default pool was looked for; kept for garbage collection only.
        max_split: Blocks of at least this size are not split.
    """

    __slots__ = (
        "_ages",
        "_expandable",
        "_plain",
        "_pools",
        "_rounding",
        "large",
        "lookups",
        "max_split",
        "small",
        "whole",
    )

    def __init__(self, config: AllocatorConfig, whole: Tally, *, ages: bool) -> None:
        self.small = Tally()
        self.large = Tally()
        self.whole = whole
        self.lookups = 0
        self.max_split = _NO_LIMIT if config.max_split_size is None else config.max_split_size
        self._rounding = config.max_non_split_rounding or config.large_segment_size
        self._expandable = config.expandable_segments
        self._ages = ages
        self._pools: dict[tuple[int, int, bool], FreeBlocks] = {}
        # With the default settings the smallest block that is large enough is always the one.
        self._plain = not (ages or config.expandable_segments or config.max_split_size is not None)

    def pool(self, stream: int, pool: int, *, is_small: bool) -> FreeBlocks:
        """The free blocks that serve a stream's requests from a pool."""
        key = (stream, pool, is_small)
        free_blocks = self._pools.get(key)
        if free_blocks is None:
            tally = self.small if is_small else self.large
            free_blocks = FreeBlocks(stream=stream, pool=pool, is_small=is_small, tally=tally)
            self._pools[key] = free_blocks
        return free_blocks

    def pools(self) -> list[FreeBlocks]:
        """All pools, in the order in which `empty_cache` visits those of one kind: by stream."""
        return [self._pools[key] for key in sorted(self._pools)]

    def take(self, free_blocks: FreeBlocks, size: int) -> Block | None:
        """Take out the free block that fits ``size`` bytes best; None when there is none."""
        keys = free_blocks.keys
        index = bisect_left(keys, size << ADDRESS_BITS)
        if not self._plain:
            index = self._refine(free_blocks, size, index)
        if index == len(keys):
            return None
        del keys[index]
        return free_blocks.blocks.pop(index)

    def cut(self, block: Block, size: int) -> None:
        """Cut a block that was taken down to ``size`` bytes if the rest is worth keeping: it stays in the cache."""
        free_blocks = block.free_blocks
        rest = block.size - size
        was_split = block.prev is not None or block.next is not None
        if rest and (free_blocks.is_small or self._expandable or (rest > SMALL_LIMIT and size < self.max_split)):
            remaining = block.cut(size)
            remaining.age_base = self.lookups
            free_blocks.add(remaining)
            if was_split:
                self._count_split(free_blocks.tally, 0, -size)
            else:
                self._count_split(free_blocks.tally, 1, rest)
        elif was_split:
            self._count_split(free_blocks.tally, -1, -block.size)

    def put_back(self, block: Block) -> None:
        """Put a block back that nobody uses any more, merged with its free neighbours."""
        free_blocks = block.free_blocks
        block.state = FREE
        split_blocks = split = 0
        before = block.prev
        if before is not None and before.state == FREE:
            free_blocks.remove(before)
            split_blocks -= 1
            split -= before.size
            before.absorb(block)
            block = before
        after = block.next
        if after is not None and after.state == FREE:
            free_blocks.remove(after)
            split_blocks -= 1
            split -= after.size
            block.absorb(after)
        block.age_base = self.lookups
        free_blocks.add(block)
        if block.prev is not None or block.next is not None:
            split_blocks += 1
            split += block.size
        self._count_split(free_blocks.tally, split_blocks, split)

    def _refine(self, free_blocks: FreeBlocks, size: int, index: int) -> int:
        """Where the settings refine the search: the index of the block to take, past the end for none."""
        if self._ages and free_blocks.pool == 0 and not free_blocks.is_small:
            self.lookups += 1
        blocks = free_blocks.blocks
        none = len(blocks)
        if index == none:
            return none
        if self._expandable:
            # A block counts with the unmapped range behind it: the growing end of a segment is taken last.
            while index + 1 < none and _size_to_grow_to(blocks[index + 1]) < _size_to_grow_to(blocks[index]):
                index += 1
        found = blocks[index].size
        if size < self.max_split <= found:
            return none
        if size >= self.max_split and found >= size + self._rounding:
            return none
        return index

    def _count_split(self, tally: Tally, blocks: int, size: int) -> None:
        # As torch does: free pages of expandable segments can always be given back, so nothing there counts as split.
        if not self._expandable:
            tally.add_split(blocks, size)
            self.whole.add_split(blocks, size)


def _size_to_grow_to(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
