"""Who holds which block of the cache: free ones, those of running sequences, and those kept for later.

Notable here:
- blocks are counted references: a sequence holds each block of its table once, the prefix tree holds each of its once
- a block that only the tree holds is idle: it counts as available, and idle blocks lie in the order of their last use,
  so that finding what to give up costs nothing
- the free block with the lowest number is taken first, so that a pool which is never full touches little memory
- free blocks and held blocks together are all blocks, at every moment
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from pippin.core.errors import InvalidArgument


class BlockPool:
    """The book-keeping of a runner's blocks. Used by one thread.

    Args:
        count: blocks, at least one.

    Attributes:
        counts: how often each block is held.
        idle: blocks that only the prefix tree holds, the longest unused first.

    Raises:
        InvalidArgument: less than one block.

    >>> pool = BlockPool(3)
    >>> [pool.take(), pool.take()], pool.free
    ([0, 1], 1)
    >>> pool.drop(0)
    >>> pool.take(), pool.free
    (0, 1)
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InvalidArgument(f"a pool needs at least one block, got {count}")
        self.count = count
        self.counts = [0] * count
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._kept = bytearray(count)
        self._free = list(range(count))  # a heap

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that a sequence could have: free ones, and idle ones once the tree gives them up."""
        return len(self._free) + len(self.idle)

    def take(self) -> int:
        """A free block, held once; there must be one."""
        block = heapq.heappop(self._free)
        self.counts[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Hold a block that is held already once more."""
        self.counts[block] += 1
        if self.counts[block] == 2 and self._kept[block]:
            del self.idle[block]

    def drop(self, block: int) -> None:
        """Give up one hold; without any the block is free."""
        self.counts[block] -= 1
        if not self.counts[block]:
            heapq.heappush(self._free, block)
        elif self.counts[block] == 1 and self._kept[block]:
            self.idle[block] = None

    def drop_all(self, table: Sequence[int]) -> None:
        """Give up a sequence's blocks, the last first: what begins like others is to be kept longest."""
        for block in reversed(table):
            self.drop(block)

    def keep(self, block: int) -> None:
        """Hold a block for the prefix tree; a sequence holds it at this moment."""
        self._kept[block] = 1
        self.counts[block] += 1

    def forget(self, block: int) -> None:
        """Give up the prefix tree's hold."""
        self._kept[block] = 0
        self.idle.pop(block, None)
        self.drop(block)
