"""The blocks of sequences: which ones the rows of their tables take, keep and give back, in each group of layers.

Notable here:
- a row is the blocks of 16 tokens, one for each group of layers
- groups with a sliding window get blocks as tokens are computed, and give those behind the window back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pippin.engine.cache.block_pool import BlockPool
from pippin.engine.cache.prefix_tree import PrefixTree, Row
from pippin.engine.model_runner import BLOCK_SIZE, GIVEN_BACK
from pippin.engine.scheduling.request_state import SequenceState, blocks_for


class BlockTables:
    """The pool of blocks, the prefix tree over it, and the tables of sequences.

    Args:
        num_blocks: blocks in the pool.
        windows: the sliding window of each group of layers; None for one that sees all.
        max_num_batched_tokens: most tokens of a sequence in one pass.
        max_snapshots: snapshots of recurrent states in the prefix tree.
        copy_block: copies one block over another.
    """

    def __init__(
        self,
        num_blocks: int,
        windows: Sequence[int | None],
        max_num_batched_tokens: int,
        max_snapshots: int,
        copy_block: Callable[[int, int], None],
    ) -> None:
        self.windows, self._max_num_batched_tokens = tuple(windows), max_num_batched_tokens
        self._full_groups, self._copy_block = self.windows.count(None), copy_block
        self._max_snapshots = max_snapshots
        self.reset(num_blocks)

    def reset(self, num_blocks: int) -> None:
        """Begin with an empty pool and an empty tree."""
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, self.windows, self._max_snapshots)

    def needed(self, rows: int) -> int:
        """Blocks that ``rows`` more rows of a table take at once: groups with windows need only so many of them."""
        return sum(rows if window is None else min(rows, self._window_rows(window)) for window in self.windows)

    def _window_rows(self, window: int) -> int:
        """Most rows of a group with a window that one sequence holds while a chunk is computed."""
        return blocks_for(window + self._max_num_batched_tokens) + 1

    def capacity(self, blocks: int) -> int:
        """Tokens of the longest sequence for which ``blocks`` are enough.

        >>> BlockTables(10, (None, 16), 16, 0, lambda source, target: None).capacity(10)
        112
        """
        rows = blocks // len(self.windows)
        while self._full_groups and self.needed(rows + 1) <= blocks:
            rows += 1
        if not self._full_groups and self.needed(2**31) <= blocks:
            return 2**31
        return rows * BLOCK_SIZE

    def append(self, sequence: SequenceState, count: int, now: int) -> None:
        """Add rows to a sequence's tables; groups with windows get blocks for the first ``now`` of them only."""
        for table, window in zip(sequence.tables, self.windows, strict=True):
            first = count if window is None else min(now, count)
            table += self.take(first) + [GIVEN_BACK] * (count - first)

    def cover(self, sequence: SequenceState, count: int) -> bool:
        """Give groups with windows the blocks of the next ``count`` tokens; False if there are too few."""
        if self._full_groups == len(self.windows):
            return True
        start = sequence.num_computed_tokens
        rows = range(start // BLOCK_SIZE, blocks_for(start + count))
        missing = [
            (table, index)
            for table, window in zip(sequence.tables, self.windows, strict=True)
            if window is not None
            for index in rows
            if table[index] == GIVEN_BACK
        ]
        if len(missing) > self.pool.num_available:
            return False
        for (table, index), block in zip(missing, self.take(len(missing)), strict=True):
            table[index] = block
        return True

    def give_back(self, sequence: SequenceState) -> None:
        """Release the blocks that no later token of a sequence sees."""
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            table = sequence.tables[group]
            if not table:  # its heads lie apart
                continue
            end = max(0, sequence.num_computed_tokens - window + 1) // BLOCK_SIZE
            for index in reversed(range(min(sequence.first_rows.get(group, 0), end), end)):
                if table[index] != GIVEN_BACK:
                    self.pool.release(table[index])
                    table[index] = GIVEN_BACK
            sequence.first_rows[group] = end

    def retain(self, rows: Sequence[Row]) -> None:
        """Add a reference to the blocks of rows."""
        for row in rows:
            for block in row:
                if block != GIVEN_BACK:
                    self.pool.retain(block)

    def release(self, rows: Sequence[Row]) -> None:
        """Release rows, the last one first: the beginning, which others may share, is evicted last."""
        for row in reversed(rows):
            self.pool.release_all([block for block in row if block != GIVEN_BACK])

    def copy(self, source: Row, target: Row) -> None:
        """Copy the blocks of one row over those of another."""
        for old, new in zip(source, target, strict=True):
            if old != GIVEN_BACK:
                self._copy_block(old, new)

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks, which must be available, evicting cached ones where needed."""
        while self.pool.num_free < count:
            self.tree.evict()
        return [self.pool.allocate() for _ in range(count)]
