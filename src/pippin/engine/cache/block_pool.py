"""The blocks of the cache: free, held by running sequences, or cached for later requests.

Notable here:
- blocks are reference-counted: each block table counts once, and so does the prefix tree
- a block that only the tree holds is idle: it counts as available; idle blocks are in the order of their last use, so
  that the next one to evict is found at once
- the pool knows which free blocks held something, whose memory can be given back to the system
- the free block with the lowest number is taken first, so that a pool which is never full touches little memory
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from pippin.core.checks import PositiveInt, checked


class BlockPool:
    """Reference counts of a runner's blocks. Used by one thread.

    Args:
        num_blocks: blocks, at least one.

    Attributes:
        ref_counts: how often each block is held.
        idle: blocks that only the prefix tree holds, the least recently used first.

    >>> pool = BlockPool(3)
    >>> [pool.allocate(), pool.allocate()], pool.num_free
    ([0, 1], 1)
    >>> pool.release(0)
    >>> pool.allocate(), pool.num_free
    (0, 1)
    """

    @checked
    def __init__(self, num_blocks: PositiveInt) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._cached = bytearray(num_blocks)
        self._used = bytearray(num_blocks)
        self._free = list(range(num_blocks))  # a heap

    @property
    def num_free(self) -> int:
        """Number of blocks without a reference."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated: free ones, and idle ones that the tree can evict."""
        return len(self._free) + len(self.idle)

    def allocate(self) -> int:
        """Take a free block; its reference count is 1. There must be a free block."""
        block = heapq.heappop(self._free)
        self.ref_counts[block] = self._used[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a block that has one already."""
        self.ref_counts[block] += 1
        if self.ref_counts[block] == 2 and self._cached[block]:
            del self.idle[block]

    def release(self, block: int) -> None:
        """Drop a reference; a block without references is free."""
        self.ref_counts[block] -= 1
        if not self.ref_counts[block]:
            heapq.heappush(self._free, block)
        elif self.ref_counts[block] == 1 and self._cached[block]:
            self.idle[block] = None

    def take_unused(self) -> list[int]:
        """Free blocks that held something since the last call, ascending: their memory can be given back.

        >>> pool = BlockPool(3)
        >>> first, second = pool.allocate(), pool.allocate()
        >>> pool.release(second)
        >>> pool.take_unused(), pool.take_unused()
        ([1], [])
        """
        found = sorted(block for block in self._free if self._used[block])
        for block in found:
            self._used[block] = 0
        return found

    def release_all(self, table: Sequence[int]) -> None:
        """Release a block table, the last block first: the beginning, which others may share, is evicted last."""
        for block in reversed(table):
            self.release(block)

    def mark_cached(self, block: int) -> None:
        """Add the reference of the prefix tree to a block that a sequence holds."""
        self._cached[block] = 1
        self.ref_counts[block] += 1

    def unmark_cached(self, block: int) -> None:
        """Drop the reference of the prefix tree."""
        self._cached[block] = 0
        self.idle.pop(block, None)
        self.release(block)
