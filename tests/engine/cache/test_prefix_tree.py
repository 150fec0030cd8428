"""The prefix tree against a list of sequences."""

import gc

import torch
from hypothesis import given, settings, strategies as st

from pippin.engine.cache.block_pool import BlockPool
from pippin.engine.cache.prefix_tree import CacheKey, PrefixTree
from pippin.engine.decoding.token_ids import common_prefix
from pippin.engine.model_runner import BLOCK_SIZE, GIVEN_BACK
from pippin.nn.lora import Adapter

KEY = CacheKey("", None)
TEXTS = st.lists(st.lists(st.sampled_from([1, 1, 1, 1, 2]), min_size=1, max_size=50), min_size=1, max_size=8)


def insert(pool, tree, key, ids):
    """What a sequence does that was computed without looking for others, and ends."""
    node, table = tree.root(key), []
    for at in range(0, len(ids), BLOCK_SIZE):
        block = pool.allocate()
        node = tree.add(node, tuple(ids[at : at + BLOCK_SIZE]), (block,))
        if node.blocks != [block] and len(ids) >= at + BLOCK_SIZE:
            pool.retain(node.blocks[0])
            pool.release(block)
            block = node.blocks[0]
        table.append(block)
    pool.release_all(table)


def held(tree, key, ids, limit=None):
    match = tree.match(key, ids, len(ids) if limit is None else limit)
    return len(match.rows) * BLOCK_SIZE + match.num_partial_tokens


@given(TEXTS, TEXTS)
@settings(max_examples=200, deadline=None)
def test_the_longest_common_beginning_is_found(texts, others):
    pool = BlockPool(40)
    tree = PrefixTree(pool)
    for ids in texts:
        insert(pool, tree, CacheKey("", None), ids)
    for ids in [*texts, *others]:
        assert held(tree, CacheKey("", None), ids) == max(common_prefix(ids, each) for each in texts)
        assert held(tree, CacheKey("", None), ids, len(ids) - 1) == min(
            len(ids) - 1, max(common_prefix(ids, each) for each in texts)
        )
        assert held(tree, CacheKey("ann", None), ids) == 0
    # everything is idle, and no block says what another says already
    assert len(pool.idle) == len(tree) == pool.num_blocks - pool.num_free
    spelled = [each.token_keys for each in tree.sequences()]
    assert sorted(spelled) == sorted(
        {
            tuple(ids): ids for ids in texts if not any(each != ids and each[: len(ids)] == ids for each in texts)
        }.values()
    )
    while len(tree):
        tree.evict()
    assert pool.num_free == pool.num_blocks
    assert not tree._roots


def test_a_limit_at_the_end_of_a_block_gives_the_whole_block():
    tree = PrefixTree(pool := BlockPool(4))
    insert(pool, tree, CacheKey("", None), list(range(40)))
    for limit, found in ((15, (0, 15)), (16, (1, 0)), (17, (1, 1)), (32, (2, 0)), (33, (2, 1))):
        match = tree.match(CacheKey("", None), list(range(40)), limit)
        assert (len(match.rows), match.num_partial_tokens) == found


def test_a_match_gives_the_blocks_of_the_prefix_and_the_one_to_copy_from():
    tree = PrefixTree(pool := BlockPool(8))
    insert(pool, tree, CacheKey("", None), list(range(40)))  # blocks 0, 1 and 2
    insert(pool, tree, CacheKey("", None), [*range(16), *[99] * 20])  # 3 is released, since 0 is equal; then 3 and 4
    match = tree.match(CacheKey("", None), [*range(36), 7], 37)
    assert (match.rows, match.node.blocks, match.partial_row, match.num_partial_tokens) == ([(0,), (1,)], [1], (2,), 4)
    match = tree.match(CacheKey("", None), [*range(16), 99, 7], 18)
    assert (match.rows, match.node.blocks, match.partial_row, match.num_partial_tokens) == ([(0,)], [0], (3,), 1)
    match = tree.match(CacheKey("", None), [7], 1)
    assert (match.rows, match.node.parent, match.num_partial_tokens) == ([], None, 0)
    assert match.node.blocks == []  # a root has none


def test_a_block_that_is_there_is_found_and_not_added_again():
    tree = PrefixTree(pool := BlockPool(8))
    first, other = tuple(range(16)), tuple(range(1, 17))
    root = tree.root(CacheKey("", None))
    assert tree.find_child(root, first) is None
    node = tree.add(root, first, (pool.allocate(),))
    tail = tree.add(node, (7, 8), (pool.allocate(),))
    root = tree.root(CacheKey("", None))
    assert tree.find_child(root, first) is node
    assert tree.find_child(root, other) is tree.find_child(node, (7, 8)) is None
    held_before = pool.ref_counts.copy()
    assert tree.add(root, first, (5,)) is node
    assert tree.add(node, (7, 8), (5,)) is tail
    assert tree.add(node, (7,), (5,)) is node  # covered by the longer one
    assert pool.ref_counts == held_before
    assert len(tree) == 2


def test_sequences_come_by_their_last_use_and_those_in_use_last():
    tree = PrefixTree(pool := BlockPool(20))
    texts = [[at] * 36 for at in range(4)]
    for text in texts:
        insert(pool, tree, CacheKey("", None), text)  # blocks 3 at and the next two
    for at in (2, 0):
        match = tree.match(CacheKey("", None), texts[at], 36)
        found = [block for row in (*match.rows, match.partial_row) for block in row]
        for block in found:
            pool.retain(block)
        if at == 2:
            pool.release_all(found)
    assert list(tree.sequences()) == [
        (CacheKey("", None), texts[at], [(3 * at,), (3 * at + 1,), (3 * at + 2,)], {}) for at in (1, 3, 2, 0)
    ]


def test_ends_are_given_up_before_beginnings_and_the_longest_unused_first():
    pool = BlockPool(40)
    tree = PrefixTree(pool)
    stem = list(range(32))
    for last in (1, 2, 3):
        insert(pool, tree, CacheKey("", None), [*stem, *[last] * 20])
    lengths = []
    for _ in range(8):
        tree.evict()
        lengths.append([held(tree, CacheKey("", None), [*stem, *[last] * 20]) for last in (1, 2, 3)])
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
    insert(pool, tree, CacheKey("", one), ids)
    insert(pool, tree, CacheKey("", None), [1])
    assert held(tree, CacheKey("", one), ids) == 40
    assert held(tree, CacheKey("", other), ids) == held(tree, CacheKey("", None), ids) == 0
    assert [key for key, *_ in tree.sequences()] == [CacheKey("", one), CacheKey("", None)]
    del one
    gc.collect()
    assert [each[:2] for each in tree.sequences()] == [(CacheKey("", None), [1])]
    while len(tree):
        tree.evict()
    assert pool.num_free == 40


def test_blocks_of_older_weights_are_not_found_and_each_sequence_says_its_key():
    pool = BlockPool(4)
    tree = PrefixTree(pool)
    ids = [1] * BLOCK_SIZE
    assert CacheKey("ann", None) == CacheKey("ann", None, 0)
    for version in (0, 3):
        insert(pool, tree, CacheKey("ann", None, version), ids)
    assert len(tree) == 2
    assert [held(tree, CacheKey("ann", None, version), ids) for version in (0, 1, 3)] == [BLOCK_SIZE, 0, BLOCK_SIZE]
    assert [each.key for each in tree.sequences()] == [CacheKey("ann", None, 0), CacheKey("ann", None, 3)]


def add_rows(pool, tree, ids, rows):
    """Nodes with these rows of blocks; the sequence that computed them ends, the first block released first."""
    node, nodes = tree.root(KEY), []
    for at, row in enumerate(rows):
        node = tree.add(node, tuple(ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]), row)
        nodes.append(node)
    for block in [block for row in rows for block in row if block != GIVEN_BACK]:
        pool.release(block)
    return nodes


@given(st.lists(st.booleans(), max_size=5), st.integers(1, 50), st.integers(0, 15))
@settings(max_examples=300, deadline=None)
def test_a_prefix_is_found_where_all_that_its_window_shows_is_there(there, window, rest):
    pool = BlockPool(20)
    tree = PrefixTree(pool, (None, window))
    ids = list(range(len(there) * BLOCK_SIZE + rest))
    rows = [(pool.allocate(), pool.allocate() if each else GIVEN_BACK) for each in [*there, *[True] * bool(rest)]]
    add_rows(pool, tree, ids, rows)

    def seen(depth):  # by the token after `depth` rows, which is one of those in its window
        return {at // BLOCK_SIZE for at in range(depth * BLOCK_SIZE) if depth * BLOCK_SIZE - at < window}

    depth = max(depth for depth in range(len(there) + 1) if all(there[row] for row in seen(depth)))
    match = tree.match(KEY, ids, len(ids))
    assert match.rows == [
        (full, windowed if row in seen(depth) else GIVEN_BACK) for row, (full, windowed) in enumerate(rows[:depth])
    ]
    assert match.num_partial_tokens == (rest if depth == len(there) else 0)


def test_a_row_without_all_its_blocks_is_not_continued_until_another_sequence_brings_them():
    tree = PrefixTree(pool := BlockPool(6), (None, 16))
    ids = tuple(range(BLOCK_SIZE))
    [node] = add_rows(pool, tree, ids, [(pool.allocate(), GIVEN_BACK)])
    root = tree.root(KEY)
    assert (node.whole, tree.find_child(root, ids), len(tree)) == (False, None, 1)
    assert tree.match(KEY, ids[:9], 9).num_partial_tokens == 0
    other = (pool.allocate(), pool.allocate())
    assert tree.add(root, ids, other) is node
    assert (node.blocks, node.whole, tree.find_child(root, ids), len(tree)) == ([0, other[1]], True, node, 2)
    assert pool.ref_counts == [1, 1, 2, 0, 0, 0]  # the block that the tree had already is not held twice
    assert tree.match(KEY, ids[:9], 9)[2:] == ((0, other[1]), 9)


def test_a_block_behind_a_window_is_evicted_alone_and_one_that_is_always_seen_with_its_row():
    tree = PrefixTree(pool := BlockPool(6), (None, 16))
    rows = [(pool.allocate(), pool.allocate()) for _ in range(2)]
    first, last = add_rows(pool, tree, list(range(32)), rows)
    for block in (rows[0][1], rows[1][0]):  # the least recently used
        pool.idle.move_to_end(block, last=False)
        tree.evict()
    assert (first.blocks, first.children, len(tree), pool.num_free) == ([rows[0][0], GIVEN_BACK], {}, 1, 5)
    assert last.parent is first
    tree.evict()
    assert (len(tree), pool.num_free, tree._roots) == (0, 6, {})


def test_rows_without_blocks_stay_as_long_as_others_follow():
    tree = PrefixTree(pool := BlockPool(6), (16, 32))
    stem, ids = list(range(32)), list(range(40))
    rows = [(pool.allocate(), pool.allocate()) for _ in range(3)]
    add_rows(pool, tree, ids, rows)  # the first block is evicted first
    held = []
    while len(tree):
        tree.evict()
        held.append([each.rows for each in tree.sequences()])
    gone = (GIVEN_BACK, GIVEN_BACK)
    assert held == [
        [[(GIVEN_BACK, 1), (2, 3), (4, 5)]],
        [[gone, (2, 3), (4, 5)]],
        [[gone, (GIVEN_BACK, 3), (4, 5)]],
        [[gone, gone, (4, 5)]],
        [[gone, gone, (GIVEN_BACK, 5)]],
        [],
    ]
    assert (pool.num_free, tree._roots, tree.match(KEY, stem, 32).rows) == (6, {}, [])


def test_a_row_without_blocks_goes_when_what_followed_it_is_gone_and_its_brother_stays():
    tree = PrefixTree(pool := BlockPool(6), (16,))
    rows = [(pool.allocate(),) for _ in range(3)]
    ids = list(range(48))
    add_rows(pool, tree, ids, rows)
    other = [*range(16), *[99] * 8]
    node = tree.add(tree.root(KEY).children[tuple(ids[:16])], tuple(other[16:]), (tail := pool.allocate(),))
    pool.release(tail)
    for _ in range(3):
        tree.evict()  # the three rows of the first sequence
    assert [each.rows for each in tree.sequences()] == [[(GIVEN_BACK,), (tail,)]]
    assert node.parent is not None
    assert not node.parent.children
    tree.evict()
    assert (len(tree), pool.num_free, tree._roots) == (0, 6, {})


def test_with_recurrent_layers_a_prefix_ends_at_a_snapshot():
    tree = PrefixTree(pool := BlockPool(6), max_snapshots=2)
    ids = list(range(56))
    nodes = add_rows(pool, tree, ids, [(pool.allocate(),) for _ in range(4)])
    assert tree.match(KEY, ids, 56) == (tree.root(KEY), [], (), 0)
    assert tree.find_child(nodes[0], nodes[1].tokens) is None
    states = {0: torch.ones(2)}
    tree.snapshot(nodes[1], states)
    assert tree.match(KEY, ids, 56) == (nodes[1], [(0,), (1,)], (), 0)  # no token of the third row is copied
    assert tree.match(KEY, ids, 31) == (tree.root(KEY), [], (), 0)
    assert tree.find_child(nodes[0], nodes[1].tokens) is nodes[1]
    assert [each.states for each in tree.sequences()] == [{1: states}]


def test_the_snapshot_that_was_not_used_for_longest_makes_room():
    tree = PrefixTree(pool := BlockPool(6), max_snapshots=2)
    ids = list(range(64))
    nodes = add_rows(pool, tree, ids, [(pool.allocate(),) for _ in range(4)])

    def stored():
        assert tree.num_snapshots == sum(node.states is not None for node in nodes)
        return [at for at, node in enumerate(nodes) if node.states is not None]

    tree.snapshot(nodes[0], {})
    tree.snapshot(nodes[1], {})
    assert tree.match(KEY, ids, 16).node is nodes[0]  # a use
    tree.snapshot(nodes[2], {})
    assert stored() == [0, 2]
    tree.snapshot(nodes[0], {})  # so is storing it again
    tree.snapshot(nodes[3], {})
    assert stored() == [0, 3]
    tree.drop_snapshot(nodes[0])
    tree.drop_snapshot(nodes[0])  # none there: nothing happens
    assert stored() == [3]
    pool.idle.move_to_end(3, last=False)
    tree.evict()  # the row goes, and its snapshot with it
    assert stored() == []


def test_a_row_stays_as_long_as_it_has_one_block():
    tree = PrefixTree(pool := BlockPool(2), (16, 16))
    add_rows(pool, tree, list(range(16)), [(pool.allocate(), pool.allocate())])
    pool.idle.move_to_end(0)  # used last
    tree.evict()
    assert ([each.rows for each in tree.sequences()], pool.num_free) == ([[(0, GIVEN_BACK)]], 1)
    tree.evict()
    assert (list(tree.sequences()), pool.num_free, tree._roots) == ([], 2, {})


def test_computations_that_differ_in_what_their_variant_names_are_apart():
    tree = PrefixTree(pool := BlockPool(4))
    keys = [CacheKey("ann", None, 0, variant) for variant in ("", "steered")]
    for key in keys:
        insert(pool, tree, key, [1] * BLOCK_SIZE)
    assert len(tree) == 2
    assert held(tree, CacheKey("ann", None, 0, "masked"), [1] * BLOCK_SIZE) == 0
    assert [each.key for each in tree.sequences()] == keys
