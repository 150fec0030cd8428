"""The prefix tree against a list of sequences."""

import gc

from hypothesis import given, settings, strategies as st

from pippin.engine.blocks import BlockPool
from pippin.engine.radix import PrefixTree
from pippin.engine.runner import BLOCK
from pippin.engine.writer import common_prefix
from pippin.nn.lora import Adapter

TEXTS = st.lists(st.lists(st.sampled_from([1, 1, 1, 1, 2]), min_size=1, max_size=50), min_size=1, max_size=8)


def insert(pool, tree, key, ids):
    """What a sequence does that was computed without looking for others, and ends."""
    node, table = tree.root(key), []
    for at in range(0, len(ids), BLOCK):
        block = pool.take()
        node = tree.add(node, tuple(ids[at : at + BLOCK]), block)
        if node.block != block and len(ids) >= at + BLOCK:
            pool.hold(node.block)
            pool.drop(block)
            block = node.block
        table.append(block)
    pool.drop_all(table)


def held(tree, key, ids, limit=None):
    match = tree.match(key, ids, len(ids) if limit is None else limit)
    return len(match.blocks) * BLOCK + match.tokens


@given(TEXTS, TEXTS)
@settings(max_examples=200, deadline=None)
def test_the_longest_common_beginning_is_found(texts, others):
    pool = BlockPool(40)
    tree = PrefixTree(pool)
    for ids in texts:
        insert(pool, tree, ("", None), ids)
    for ids in [*texts, *others]:
        assert held(tree, ("", None), ids) == max(common_prefix(ids, each) for each in texts)
        assert held(tree, ("", None), ids, len(ids) - 1) == min(
            len(ids) - 1, max(common_prefix(ids, each) for each in texts)
        )
        assert held(tree, ("ann", None), ids) == 0
    # everything is idle, and no block says what another says already
    assert len(pool.idle) == len(tree) == pool.count - pool.free
    spelled = [ids for _, ids, _ in tree.sequences()]
    assert sorted(spelled) == sorted(
        {
            tuple(ids): ids for ids in texts if not any(each != ids and each[: len(ids)] == ids for each in texts)
        }.values()
    )
    while len(tree):
        tree.evict()
    assert pool.free == pool.count
    assert not tree._roots


def test_ends_are_given_up_before_beginnings_and_the_longest_unused_first():
    pool = BlockPool(40)
    tree = PrefixTree(pool)
    stem = list(range(32))
    for last in (1, 2, 3):
        insert(pool, tree, ("", None), [*stem, *[last] * 20])
    lengths = []
    for _ in range(8):
        tree.evict()
        lengths.append([held(tree, ("", None), [*stem, *[last] * 20]) for last in (1, 2, 3)])
    assert lengths == [
        [48, 52, 52],
        [32, 52, 52],
        [32, 48, 52],
        [32, 32, 52],
        [32, 32, 48],
        [32, 32, 32],
        [16] * 3,
        [0] * 3,
    ]


def test_adapters_are_apart_and_not_kept_in_memory():
    pool = BlockPool(40)
    tree = PrefixTree(pool)
    one, other = Adapter("a", {}), Adapter("a", {})
    ids = list(range(40))
    insert(pool, tree, ("", one), ids)
    assert held(tree, ("", one), ids) == 40
    assert held(tree, ("", other), ids) == held(tree, ("", None), ids) == 0
    assert [key for key, *_ in tree.sequences()] == [("", one)]
    del one
    gc.collect()
    assert list(tree.sequences()) == []
    while len(tree):
        tree.evict()
    assert pool.free == 40
