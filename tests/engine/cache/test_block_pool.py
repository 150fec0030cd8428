"""Counting blocks, against a model that keeps every hold in a list."""

import pytest
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.engine.cache.block_pool import BlockPool

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "hold", "drop", "keep", "forget"]), st.integers(0, 5)), min_size=20, max_size=60
)


@given(ACTIONS)
@settings(max_examples=200, deadline=None)
def test_free_and_held_blocks_are_all_blocks_after_any_history(actions):
    pool, holds, kept, idle = BlockPool(6), [0] * 6, [False] * 6, []
    for what, at in actions:
        mine = [holds[block] - kept[block] for block in range(6)]  # holds of sequences
        possible = {
            "take": [block for block in range(6) if not holds[block]],
            "hold": [block for block in range(6) if holds[block]],
            "drop": [block for block in range(6) if mine[block]],
            "keep": [block for block in range(6) if mine[block] and not kept[block]],
            "forget": [block for block in range(6) if kept[block]],
        }[what]
        if not possible:
            continue
        block = possible[at % len(possible)]
        if what == "take":
            taken = pool.allocate()
            assert taken == holds.index(0)  # the lowest that is free
            holds[taken] = 1
        elif what == "hold":
            pool.retain(block)
            holds[block] += 1
            if block in idle:
                idle.remove(block)
        elif what == "drop":
            pool.release(block)
            holds[block] -= 1
            if kept[block] and mine[block] == 1:
                idle.append(block)
        elif what == "keep":
            pool.mark_cached(block)
            holds[block] += 1
            kept[block] = True
        else:
            pool.unmark_cached(block)
            holds[block] -= 1
            kept[block] = False
            idle = [each for each in idle if each != block]
        assert pool.ref_counts == holds
        assert pool.num_free == holds.count(0)
        assert list(pool.idle) == idle  # the longest unused first
        assert pool.num_available == holds.count(0) + len(idle)


def test_of_a_released_table_the_last_block_is_idle_first():
    pool = BlockPool(4)
    table = [pool.allocate() for _ in range(4)]
    for block in table[:3]:
        pool.mark_cached(block)
    pool.release_all(table)
    assert list(pool.idle) == table[2::-1]
    assert pool.num_free == 1


def test_a_pool_has_at_least_one_block():
    with pytest.raises(InvalidArgument, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)
