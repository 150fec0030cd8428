"""Counting blocks, against a model that keeps every hold in a list."""

import pytest
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.engine.blocks import BlockPool

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "hold", "drop", "keep", "forget"]), st.integers(0, 5)), max_size=60
)


@given(ACTIONS)
@settings(max_examples=200, deadline=None)
def test_free_and_held_blocks_are_all_blocks_after_any_history(actions):
    pool, holds, kept, idle = BlockPool(6), [0] * 6, [False] * 6, []
    for what, block in actions:
        mine = holds[block] - kept[block]  # holds of sequences
        if what == "take" and pool.free:
            taken = pool.take()
            assert taken == holds.index(0)  # the lowest that is free
            holds[taken] = 1
        elif what == "hold" and holds[block]:
            pool.hold(block)
            holds[block] += 1
            if block in idle:
                idle.remove(block)
        elif what == "drop" and mine:
            pool.drop(block)
            holds[block] -= 1
            if kept[block] and mine == 1:
                idle.append(block)
        elif what == "keep" and mine and not kept[block]:
            pool.keep(block)
            holds[block] += 1
            kept[block] = True
        elif what == "forget" and kept[block]:
            pool.forget(block)
            holds[block] -= 1
            kept[block] = False
            idle = [each for each in idle if each != block]
        assert pool.counts == holds
        assert pool.free == holds.count(0)
        assert list(pool.idle) == idle  # the longest unused first
        assert pool.available == holds.count(0) + len(idle)


def test_a_pool_has_at_least_one_block():
    with pytest.raises(InvalidArgument, match="at least one block, got 0"):
        BlockPool(0)
